"""Every kind of leaf, into every kind of `like`, by every way in.

`leaves` are saved, `likes` say what is wanted, `ways` lead from one to the other, in
different `contexts`. `oracle` and `where` say what comes out: an exact value, or a
refusal. The rules are those of the table in `docs/usage/restoring.md`.
"""
