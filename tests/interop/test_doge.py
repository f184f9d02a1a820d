"""The dynamic-mask layer and the whole Doge model, against Hugging Face's (eager, float32): ``make test-interop``."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("safetensors")
from flax import nnx  # noqa: E402

from jax_dma import doge  # noqa: E402

B, WINDOW = 2, 12
CONFIG = doge.DogeConfig(
    vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, keep_window_size=WINDOW, rms_norm_eps=1e-5, rope_theta=5000.0,
)  # fmt: skip
LENGTHS = {"shorter than the window": 9, "longer": 40}
PADDING = {
    "no padding": lambda T: np.ones((B, T), bool),
    "right": lambda T: np.arange(T) < np.array([[T], [T - 4]]),
    "left": lambda T: np.arange(T) >= np.array([[5], [0]]),
}


def theirs(config=CONFIG, seed=0):
    """Hugging Face's model with random weights."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    settings = {name: x for name, x in config.to_json().items() if name not in ("architectures", "model_type")}
    torch.manual_seed(seed)
    model = transformers.DogeForCausalLM(transformers.DogeConfig(**settings, attn_implementation="eager"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return model.eval()


def ours(model, config=CONFIG, **options):
    """A Doge with the weights of a torch model."""
    result = doge.Doge(config, rngs=nnx.Rngs(0), **options)
    doge.load(result, {name: x.detach().numpy() for name, x in model.state_dict().items()})
    return result


def random_tokens(T, seed):
    """No token twice in a text: in the first layer it would get the same score, and torch.topk does not order ties."""
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(CONFIG.vocab_size)[:T] for _ in range(B)])


def close(got, want, tolerance=2e-4):
    got, want = np.asarray(got), want.detach().numpy() if hasattr(want, "detach") else np.asarray(want)
    assert np.linalg.norm(got - want) <= tolerance * max(np.linalg.norm(want), 1e-3)


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("length", LENGTHS)
def test_attention(length, padding):
    """Output and gradients of the layer alone; rows of padding are left out."""
    model = theirs()
    import torch

    T, layer = LENGTHS[length], model.model.layers[0].self_attn
    rng, valid = np.random.default_rng(1), PADDING[padding](LENGTHS[length])
    x, weight = (rng.standard_normal((B, T, CONFIG.hidden_size)).astype(np.float32) for _ in range(2))
    weight *= valid[..., None]

    ids = torch.arange(T)[None]
    inputs = torch.tensor(x, requires_grad=True)
    hidden = ~(np.tril(np.ones((T, T), bool)) & valid[:, None, :])[:, None]
    mask = torch.zeros(hidden.shape).masked_fill(torch.tensor(hidden), torch.finfo(torch.float32).min)
    out, _ = layer(inputs, model.model.rotary_emb(inputs, ids), mask)
    (out * torch.tensor(weight)).sum().backward()

    attention = ours(model).layers[0].attention
    given = None if valid.all() else jnp.asarray(valid)
    got = attention(jnp.asarray(x), valid=given)
    close(np.asarray(got)[valid], out.detach().numpy()[valid])
    loss = lambda attention, x: (attention(x, valid=given) * weight).sum()
    gradients, dx = nnx.grad(loss, argnums=(0, 1))(attention, jnp.asarray(x))
    close(dx, inputs.grad)
    for name, projection in (("query", "q"), ("key", "k"), ("value", "v"), ("score", "dt"), ("out", "o")):
        close(gradients[name]["kernel"][...].T, getattr(layer, f"{projection}_proj").weight.grad)
    close(gradients["A"][...], layer.A.grad)
    close(gradients["query_norm"]["scale"][...], layer.q_norm.weight.grad)
    close(gradients["key_norm"]["scale"][...], layer.k_norm.weight.grad)


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("length", LENGTHS)
def test_whole_model(length, padding):
    model = theirs()
    import torch

    T, valid = LENGTHS[length], PADDING[padding](LENGTHS[length])
    tokens = random_tokens(T, 2)
    weight = np.random.default_rng(3).standard_normal((B, T, CONFIG.vocab_size)).astype(np.float32) * valid[..., None]

    attention_mask = None if valid.all() else torch.tensor(valid.astype(np.int64))
    logits = model(torch.tensor(tokens), attention_mask=attention_mask, use_cache=False).logits
    (logits * torch.tensor(weight)).sum().backward()

    flax_model = ours(model)
    given = None if valid.all() else jnp.asarray(valid)
    graph, state = nnx.split(flax_model)

    @jax.jit
    def run(state):
        def loss(state):
            out = nnx.merge(graph, state)(jnp.asarray(tokens), valid=given)
            return (out * weight).sum(), out

        return jax.grad(loss, has_aux=True)(state)

    gradients, out = run(state)
    close(np.asarray(out)[valid], logits.detach().numpy()[valid])
    gradients = doge.weights_of(nnx.merge(graph, gradients))
    for name, parameter in model.named_parameters():
        close(gradients[name], parameter.grad, 1e-3)


def test_decoding():
    """A prompt and then token by token, each with its own cache."""
    model = theirs()
    import torch

    tokens, prompt = random_tokens(40, 4), 20
    with torch.no_grad():
        result = model(torch.tensor(tokens[:, :prompt]), use_cache=True)
        want = [result.logits[:, -1]]
        for t in range(prompt, 40):
            result = model(torch.tensor(tokens[:, t : t + 1]), past_key_values=result.past_key_values, use_cache=True)
            want.append(result.logits[:, -1])

    flax_model = ours(model)
    graph, state = nnx.split(flax_model)

    @jax.jit
    def decode(state, tokens, cache):
        logits, cache = nnx.merge(graph, state)(tokens[:, :prompt], cache=cache)

        def step(cache, token):
            logits, cache = nnx.merge(graph, state)(token[:, None], cache=cache)
            return cache, logits[:, -1]

        _, rest = jax.lax.scan(step, cache, tokens[:, prompt:].T)
        return jnp.concatenate([logits[None, :, -1], rest])

    close(decode(state, jnp.asarray(tokens), flax_model.empty_cache(B)), torch.stack(want))


@pytest.mark.parametrize("tied", [False, True])
def test_checkpoints_of_transformers(tmp_path, tied):
    config = dataclasses.replace(CONFIG, tie_word_embeddings=tied, attention_bias=True, mlp_bias=True)
    model = theirs(config)
    import torch
    import transformers

    tokens = random_tokens(30, 5)
    want = model(torch.tensor(tokens)).logits
    model.save_pretrained(tmp_path / "theirs")
    read = doge.from_doge(tmp_path / "theirs")
    assert read.config == config
    close(read(jnp.asarray(tokens)), want)
    doge.to_doge(read, tmp_path / "ours")
    back = transformers.DogeForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    close(back(torch.tensor(tokens)).logits.detach(), want, 1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip(tmp_path, dtype):
    """Needs neither torch nor transformers."""
    model = doge.Doge(CONFIG, param_dtype=jnp.dtype(dtype), rngs=nnx.Rngs(1))
    doge.to_doge(model, tmp_path)
    read = doge.from_doge(tmp_path, param_dtype=jnp.dtype(dtype))
    assert read.config == CONFIG
    want, got = doge.weights_of(model), doge.weights_of(read)
    assert want.keys() == got.keys()
    for name in want:
        assert want[name].dtype == got[name].dtype == dtype
        np.testing.assert_array_equal(want[name], got[name])


def test_what_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is_moe=True is not supported"):
        doge.DogeConfig.from_json({**CONFIG.to_json(), "is_moe": True})
    with pytest.raises(ValueError, match="rope_type='yarn' is not supported"):
        doge.DogeConfig.from_json({**CONFIG.to_json(), "rope_parameters": {"rope_type": "yarn"}})
    model = doge.Doge(CONFIG, rngs=nnx.Rngs(0))
    weights = doge.weights_of(model)
    weights["extra"] = weights.pop("model.norm.weight")
    with pytest.raises(ValueError, match=r"missing \['model.norm.weight'\], unknown \['extra'\]"):
        doge.load(model, weights)
    weights = doge.weights_of(model) | {"model.norm.weight": jnp.ones(7)}
    with pytest.raises(ValueError, match=r"model.norm.weight has shape \(7,\)"):
        doge.load(model, weights)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG.to_json()))
    with pytest.raises(ValueError, match="no .safetensors file"):
        doge.from_doge(tmp_path)
