"""Errors in the words of the command line: its options, not arguments of Python."""

import re


_WORDS = [
    (re.compile(pattern), words)
    for pattern, words in (
        # A command opens what it is given by itself, or has no such way out.
        (r"Pass `format`, if", "`eqx-ckpt convert` takes `--format`, if"),
        (
            "pass the PyTree that was saved as `like`",
            "`eqx-ckpt convert` takes the PyTree, by `--like MODULE:NAME`",
        ),
        (r"an older `step`", "an older `--step`"),
        (r", by a manager of that", ""),
        (r": pass `eqx_ckpt\.interop\.\w+\([^`]*\)` in place of the path", ""),
        (r", or restore the newest step with a `CheckpointManager`", ""),
        (r" A restore can choose leaves .* with `where` or `filter_spec`\.", ""),
        (r", or other leaves by `where`", ""),
        (r"Pass that(, or one of `jax.ShapeDtypeStruct`s,)? as `like`", "Pass `like`"),
        (r"Pass `strict=False` to", "Leave out `--strict` to"),
        (r"pass one of them as `item`[^.]*\.", "pass the path of one of them."),
        (r"(`overwrite=True`) to a function that takes it", r"\1"),
        (r" and `prefix=('[^`]*')`", r", and \1 as PREFIX"),
        (r"`prefix`", "PREFIX"),
        (r"`mirror`", "MIRROR"),
        (r"`like`", "`--like MODULE:NAME`"),
        (r"`(overwrite|strict)=True`", r"`--\1`"),
        (r"`(layout|compression|to)='(\w+)'`", r"`--\1 \2`"),
        (r"`(overwrite|strict|layout|compression|to|format|steps|digest)`", r"`--\1`"),
    )
]


def in_options(problem: object) -> str:
    """What an error says, to somebody who calls a command."""
    text = str(problem)
    for pattern, words in _WORDS:
        text = pattern.sub(words, text)
    return text
