"""Weights under the names of real architectures, in Equinox models of these names.

The logits are compared with those of a forward pass in NumPy on the tensors.
"""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Bool, Float, Int

import eqx_ckpt
from eqx_ckpt import interop


library = pytest.importorskip("safetensors.numpy")

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 11, 8, 2, 2, 5
TOKENS = np.array([3, 1, 4, 1, 5])
MASK = np.tril(np.ones((LENGTH, LENGTH), bool))


def attend(xp, q, k, v):
    """Causal attention of heads in the first axis, by NumPy or JAX."""
    scores = q @ xp.swapaxes(k, 1, 2) / np.sqrt(q.shape[-1])
    scores = xp.where(MASK, scores, -np.inf)
    scores = xp.exp(scores - scores.max(-1, keepdims=True))
    return scores / scores.sum(-1, keepdims=True) @ v


def heads(xp, x):
    return xp.swapaxes(x.reshape(LENGTH, -1, WIDTH // HEADS), 0, 1)


def joined(xp, x):
    return xp.swapaxes(x, 0, 1).reshape(LENGTH, WIDTH)


def rotated(xp, x):
    half = x.shape[-1] // 2
    angles = np.outer(np.arange(LENGTH), 10000.0 ** (-np.arange(half) / half))
    cos, sin = np.cos(angles).astype("f"), np.sin(angles).astype("f")
    a, b = x[..., :half], x[..., half:]
    return xp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


class Attention(eqx.Module):
    q_proj: eqx.nn.Linear
    k_proj: eqx.nn.Linear
    v_proj: eqx.nn.Linear
    o_proj: eqx.nn.Linear


class Gated(eqx.Module):
    gate_proj: eqx.nn.Linear
    up_proj: eqx.nn.Linear
    down_proj: eqx.nn.Linear


class LlamaLayer(eqx.Module):
    input_layernorm: eqx.nn.RMSNorm
    self_attn: Attention
    post_attention_layernorm: eqx.nn.RMSNorm
    mlp: Gated

    def __call__(self, x):
        y = jax.vmap(self.input_layernorm)(x)
        q = rotated(jnp, heads(jnp, jax.vmap(self.self_attn.q_proj)(y)))
        k = rotated(jnp, heads(jnp, jax.vmap(self.self_attn.k_proj)(y)))
        v = heads(jnp, jax.vmap(self.self_attn.v_proj)(y))
        k, v = (jnp.repeat(z, HEADS, axis=0) for z in (k, v))
        x = x + jax.vmap(self.self_attn.o_proj)(joined(jnp, attend(jnp, q, k, v)))
        y = jax.vmap(self.post_attention_layernorm)(x)
        gate = jax.nn.silu(jax.vmap(self.mlp.gate_proj)(y))
        return x + jax.vmap(self.mlp.down_proj)(gate * jax.vmap(self.mlp.up_proj)(y))


class LlamaBody(eqx.Module):
    embed_tokens: eqx.nn.Embedding
    layers: list[LlamaLayer]
    norm: eqx.nn.RMSNorm


class Llama(eqx.Module):
    model: LlamaBody
    lm_head: eqx.nn.Linear

    def __init__(self, key):
        def linear(n, m):
            return eqx.nn.Linear(n, m, use_bias=False, key=key)

        def norm():
            return eqx.nn.RMSNorm(WIDTH, eps=1e-6, use_bias=False)

        d, kv = WIDTH, WIDTH // HEADS
        layers = [
            LlamaLayer(
                norm(),
                Attention(linear(d, d), linear(d, kv), linear(d, kv), linear(d, d)),
                norm(),
                Gated(linear(d, 2 * d), linear(d, 2 * d), linear(2 * d, d)),
            )
            for _ in range(LAYERS)
        ]
        embedding = eqx.nn.Embedding(VOCABULARY, WIDTH, key=key)
        self.model = LlamaBody(embedding, layers, norm())
        self.lm_head = linear(WIDTH, VOCABULARY)

    def __call__(self, tokens: Int[Array, " length"]) -> Float[Array, "length _"]:
        x = jax.vmap(self.model.embed_tokens)(tokens)
        for layer in self.model.layers:
            x = layer(x)
        return jax.vmap(self.lm_head)(jax.vmap(self.model.norm)(x))


def llama_in_numpy(t, tokens):
    def norm(x, name):
        scale = np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
        return x / scale * t[f"{name}.weight"]

    x = t["model.embed_tokens.weight"][tokens]
    for i in range(LAYERS):
        at = f"model.layers.{i}"
        y = norm(x, f"{at}.input_layernorm")
        q, k, v = (heads(np, y @ t[f"{at}.self_attn.{p}_proj.weight"].T) for p in "qkv")
        q, k = rotated(np, q), rotated(np, k)
        k, v = (np.repeat(z, HEADS, axis=0) for z in (k, v))
        y = joined(np, attend(np, q, k, v))
        x = x + y @ t[f"{at}.self_attn.o_proj.weight"].T
        y = norm(x, f"{at}.post_attention_layernorm")
        gate = y @ t[f"{at}.mlp.gate_proj.weight"].T
        up = y @ t[f"{at}.mlp.up_proj.weight"].T
        y = gate / (1 + np.exp(-gate)) * up
        x = x + y @ t[f"{at}.mlp.down_proj.weight"].T
    return norm(x, "model.norm") @ t["lm_head.weight"].T


LLAMA = {
    "model.embed_tokens.weight": (VOCABULARY, WIDTH),
    "model.norm.weight": (WIDTH,),
    "lm_head.weight": (VOCABULARY, WIDTH),
    **{
        f"model.layers.{i}.{name}.weight": shape
        for i in range(LAYERS)
        for name, shape in {
            "input_layernorm": (WIDTH,),
            "self_attn.q_proj": (WIDTH, WIDTH),
            "self_attn.k_proj": (WIDTH // HEADS, WIDTH),
            "self_attn.v_proj": (WIDTH // HEADS, WIDTH),
            "self_attn.o_proj": (WIDTH, WIDTH),
            "post_attention_layernorm": (WIDTH,),
            "mlp.gate_proj": (2 * WIDTH, WIDTH),
            "mlp.up_proj": (2 * WIDTH, WIDTH),
            "mlp.down_proj": (WIDTH, 2 * WIDTH),
        }.items()
    },
}


class Conv1D(eqx.Module):
    """As in GPT-2: a linear layer whose weight is not transposed."""

    weight: Float[Array, "n m"]
    bias: Float[Array, " m"]

    def __call__(self, x):
        return x @ self.weight + self.bias


class GptAttention(eqx.Module):
    bias: Bool[Array, "1 1 length length"]
    c_attn: Conv1D
    c_proj: Conv1D


class GptMlp(eqx.Module):
    c_fc: Conv1D
    c_proj: Conv1D


class Block(eqx.Module):
    ln_1: eqx.nn.LayerNorm
    attn: GptAttention
    ln_2: eqx.nn.LayerNorm
    mlp: GptMlp

    def __call__(self, x):
        y = self.attn.c_attn(jax.vmap(self.ln_1)(x))
        q, k, v = (heads(jnp, z) for z in jnp.split(y, 3, axis=-1))
        x = x + self.attn.c_proj(joined(jnp, attend(jnp, q, k, v)))
        y = self.mlp.c_fc(jax.vmap(self.ln_2)(x))
        return x + self.mlp.c_proj(jax.nn.gelu(y, approximate=True))


class Gpt(eqx.Module):
    wte: eqx.nn.Embedding
    wpe: eqx.nn.Embedding
    h: list[Block]
    ln_f: eqx.nn.LayerNorm

    def __init__(self, key):
        def conv(n, m):
            return Conv1D(jnp.zeros((n, m)), jnp.zeros(m))

        d = WIDTH
        self.h = [
            Block(
                eqx.nn.LayerNorm(d),
                GptAttention(jnp.asarray(MASK[None, None]), conv(d, 3 * d), conv(d, d)),
                eqx.nn.LayerNorm(d),
                GptMlp(conv(d, 4 * d), conv(4 * d, d)),
            )
            for _ in range(LAYERS)
        ]
        self.wte = eqx.nn.Embedding(VOCABULARY, d, key=key)
        self.wpe = eqx.nn.Embedding(LENGTH, d, key=key)
        self.ln_f = eqx.nn.LayerNorm(d)

    def __call__(self, tokens: Int[Array, " length"]) -> Float[Array, "length _"]:
        x = jax.vmap(self.wte)(tokens) + self.wpe.weight[: len(tokens)]
        for block in self.h:
            x = block(x)
        return jax.vmap(self.ln_f)(x) @ self.wte.weight.T


def gpt_in_numpy(t, tokens):
    def norm(x, name):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
        return x * t[f"{name}.weight"] + t[f"{name}.bias"]

    def conv(x, name):
        return x @ t[f"{name}.weight"] + t[f"{name}.bias"]

    x = t["wte.weight"][tokens] + t["wpe.weight"]
    for i in range(LAYERS):
        y = conv(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn")
        q, k, v = (heads(np, z) for z in np.split(y, 3, axis=-1))
        x = x + conv(joined(np, attend(np, q, k, v)), f"h.{i}.attn.c_proj")
        y = conv(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
        y = y / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
        x = x + conv(y, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ t["wte.weight"].T


D = WIDTH
GPT = {
    "wte.weight": (VOCABULARY, D),
    "wpe.weight": (LENGTH, D),
    "ln_f.weight": (D,),
    "ln_f.bias": (D,),
    **{
        f"h.{i}.{name}": shape
        for i in range(LAYERS)
        for name, shape in {
            "ln_1.weight": (D,),
            "ln_1.bias": (D,),
            "ln_2.weight": (D,),
            "ln_2.bias": (D,),
            "attn.c_attn.weight": (D, 3 * D),
            "attn.c_attn.bias": (3 * D,),
            "attn.c_proj.weight": (D, D),
            "attn.c_proj.bias": (D,),
            "mlp.c_fc.weight": (D, 4 * D),
            "mlp.c_fc.bias": (4 * D,),
            "mlp.c_proj.weight": (4 * D, D),
            "mlp.c_proj.bias": (D,),
        }.items()
    },
}


def test_a_llama_in_two_files(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {n: rng.normal(size=s).astype(np.float32) for n, s in LLAMA.items()}
    names = list(tensors)
    weight_map = {}
    for i, part in enumerate((names[:9], names[9:])):
        file = f"model-{i + 1:05}-of-00002.safetensors"
        library.save_file({n: tensors[n] for n in part}, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    skeleton = eqx.filter_eval_shape(Llama, jax.random.key(0))
    model = eqx_ckpt.tree_deserialise_leaves(
        interop.open_safetensors(tmp_path), skeleton
    )
    expected = llama_in_numpy(tensors, TOKENS)
    found = eqx.filter_jit(model)(TOKENS)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_a_gpt_2(tmp_path):
    rng = np.random.default_rng(1)
    tensors = {n: rng.normal(size=s).astype(np.float32) for n, s in GPT.items()}
    masks = {f"h.{i}.attn.bias": MASK[None, None] for i in range(LAYERS)}
    library.save_file({**tensors, **masks}, tmp_path / "model.safetensors")
    source = interop.open_safetensors(tmp_path / "model.safetensors")
    skeleton = eqx.filter_eval_shape(Gpt, jax.random.key(0))
    model = eqx_ckpt.tree_deserialise_leaves(source, skeleton)
    expected = gpt_in_numpy(tensors, TOKENS)
    found = eqx.filter_jit(model)(TOKENS)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


class FusedBlock(eqx.Module):
    """GPT-2 with Equinox's own layers, whose weights are transposed."""

    ln_1: eqx.nn.LayerNorm
    qkv: tuple[eqx.nn.Linear, eqx.nn.Linear, eqx.nn.Linear]
    out: eqx.nn.Linear
    ln_2: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        d = WIDTH
        self.ln_1, self.ln_2 = eqx.nn.LayerNorm(d), eqx.nn.LayerNorm(d)
        q, k, v, self.out = (eqx.nn.Linear(d, d, key=key) for _ in range(4))
        self.qkv = (q, k, v)
        self.up = eqx.nn.Linear(d, 4 * d, key=key)
        self.down = eqx.nn.Linear(4 * d, d, key=key)

    def __call__(self, x):
        y = jax.vmap(self.ln_1)(x)
        q, k, v = (heads(jnp, jax.vmap(layer)(y)) for layer in self.qkv)
        x = x + jax.vmap(self.out)(joined(jnp, attend(jnp, q, k, v)))
        y = jax.vmap(self.up)(jax.vmap(self.ln_2)(x))
        return x + jax.vmap(self.down)(jax.nn.gelu(y, approximate=True))


class ScannedGpt(eqx.Module):
    tokens: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    blocks: FusedBlock
    norm: eqx.nn.LayerNorm

    def __init__(self, key):
        self.tokens = eqx.nn.Embedding(VOCABULARY, WIDTH, key=key)
        self.positions = eqx.nn.Embedding(LENGTH, WIDTH, key=key)
        self.blocks = eqx.filter_vmap(FusedBlock)(jax.random.split(key, LAYERS))
        self.norm = eqx.nn.LayerNorm(WIDTH)

    def __call__(self, tokens: Int[Array, " length"]) -> Float[Array, "length _"]:
        x = jax.vmap(self.tokens)(tokens) + self.positions.weight[: len(tokens)]
        arrays, rest = eqx.partition(self.blocks, eqx.is_array)
        x, _ = jax.lax.scan(lambda x, a: (eqx.combine(a, rest)(x), None), x, arrays)
        return jax.vmap(self.norm)(x) @ self.tokens.weight.T


def from_gpt(old):
    """Split, transposed and stacked: from the names of GPT-2 to those of the model."""

    def linear(conv):
        return {"weight": conv["weight"].T, "bias": conv["bias"]}

    def block(b):
        weights = jnp.split(b["attn"]["c_attn"]["weight"].T, 3)
        biases = jnp.split(b["attn"]["c_attn"]["bias"], 3)
        pairs = zip(weights, biases, strict=True)
        return {
            "ln_1": b["ln_1"],
            "qkv": [{"weight": w, "bias": b} for w, b in pairs],
            "out": linear(b["attn"]["c_proj"]),
            "ln_2": b["ln_2"],
            "up": linear(b["mlp"]["c_fc"]),
            "down": linear(b["mlp"]["c_proj"]),
        }

    blocks = [block(old["h"][i]) for i in range(LAYERS)]
    return {
        "tokens": old["wte"],
        "positions": old["wpe"],
        "blocks": jax.tree.map(lambda *xs: jnp.stack(xs), *blocks),
        "norm": old["ln_f"],
    }


def to_gpt(old):
    """And back."""

    def conv(linear):
        return {"weight": linear["weight"].T, "bias": linear["bias"]}

    def block(b):
        weight = jnp.concatenate([b["qkv"][j]["weight"] for j in range(3)]).T
        bias = jnp.concatenate([b["qkv"][j]["bias"] for j in range(3)])
        return {
            "ln_1": b["ln_1"],
            "attn": {
                "c_attn": {"weight": weight, "bias": bias},
                "c_proj": conv(b["out"]),
            },
            "ln_2": b["ln_2"],
            "mlp": {"c_fc": conv(b["up"]), "c_proj": conv(b["down"])},
        }

    def layer(i):
        return block(jax.tree.map(lambda x: x[i], old["blocks"]))

    return {
        "wte": old["tokens"],
        "wpe": old["positions"],
        "h": [layer(i) for i in range(LAYERS)],
        "ln_f": old["norm"],
    }


@pytest.mark.slow
def test_a_gpt_2_into_another_model_and_back(tmp_path):
    rng = np.random.default_rng(2)
    tensors = {n: rng.normal(size=s).astype(np.float32) for n, s in GPT.items()}
    library.save_file(tensors, tmp_path / "model.safetensors")
    source = interop.open_safetensors(tmp_path / "model.safetensors")
    skeleton = eqx.filter_eval_shape(ScannedGpt, jax.random.key(0))
    # What is no weight of GPT-2: the numbers that Equinox's layers hold.
    skeleton = eqx.filter(skeleton, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    weights = eqx_ckpt.tree_deserialise_leaves(source, skeleton, transform=from_gpt)
    model = eqx.combine(weights, ScannedGpt(jax.random.key(0)))
    expected = gpt_in_numpy(tensors, TOKENS)
    found = eqx.filter_jit(model)(TOKENS)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)

    eqx_ckpt.tree_serialise_leaves(tmp_path / "ckpt", weights)
    path = interop.to_safetensors(
        tmp_path / "ckpt", tmp_path / "back.safetensors", transform=to_gpt
    )
    back = library.load_file(path)
    assert back.keys() == tensors.keys()
    assert all((back[name] == tensors[name]).all() for name in tensors)
