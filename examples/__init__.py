"""Training on real data, and restoring in whole and in part with `eqx_ckpt`.

- `digits`: the model, the data and one step of training. Nothing in it is about saving.
- `train`: trains and saves as it goes; goes on after a kill.
- `evaluate`: restores the model alone, and measures its accuracy.
- `transfer`: restores the encoder into another model, and trains that.
- `sampling`: samples a posterior, and records as it goes; goes on after a kill.
- `demo`: runs those above as processes of their own, kills two, and checks them.

Start with `python -m examples.demo`.
"""
