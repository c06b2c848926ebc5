"""Every kind of leaf, into every kind of `like`, by every way in.

`leaves` are saved, `likes` say what is wanted, `routes` lead from one to the other: by
a place, a format, arguments or a transform, in `contexts`. `oracle` and `where`
say what comes out: an exact value or a refusal, and what `match` says of it. The rules
are those of the table in `docs/usage/restoring.md`. In most ways, `likes.mixed` draws a
`like` for each leaf, always the same ones.
"""
