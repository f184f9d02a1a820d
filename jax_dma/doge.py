"""The Doge language models in Flax (nnx): their published weights, and the dynamic-mask layer in a whole model.

The architecture is that of ``DogeForCausalLM`` in Hugging Face's transformers, with dense feed-forward layers:

    x = a * x + attention(norm(x))       a and b: a learned factor for each channel
    x = b * x + mlp(norm(x))             mlp(x) = down(silu(gate(x)) * up(x))

``from_doge`` reads a checkpoint (config.json and safetensors), ``to_doge`` writes one.
"""

import dataclasses
import functools
import json
from pathlib import Path

import jax.numpy as jnp
from flax import nnx

from jax_dma.dynamic_mask import DynamicMaskAttention, rotary


@dataclasses.dataclass(frozen=True)
class DogeConfig:
    """The shape of a model, by the names in its config.json.

    Attributes:
      vocab_size: how many tokens there are.
      hidden_size: channels of the residual stream.
      intermediate_size: channels within the feed-forward layers.
      num_hidden_layers: how many layers.
      num_attention_heads, num_key_value_heads: N and K.
      keep_window_size: how many keys each query sees.
      rms_norm_eps: of all normalisations.
      rope_theta: the base of the rotary embedding.
      attention_bias, mlp_bias: whether these projections have a bias.
      tie_word_embeddings: whether the head is the transpose of the embedding.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    keep_window_size: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False

    @classmethod
    def from_json(cls, config):
        """From the dictionary in a config.json; ValueError for what is not supported."""
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        supported = {
            "is_moe": (False,),
            "hidden_act": ("silu",),
            "head_dim": (None, config["hidden_size"] // config["num_attention_heads"]),
            # "dynamic" is the same up to the length that the model was made for.
            "rope_type": ("default", "dynamic"),
        }
        given = {"is_moe": False, "hidden_act": "silu", "head_dim": None, "rope_type": "default", **config, **rope}
        for name, values in supported.items():
            if given[name] not in values:
                raise ValueError(f"{name}={given[name]!r} is not supported; it may be one of {values}")
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        known = {field.name: config[field.name] for field in dataclasses.fields(cls) if field.name in config}
        theta = rope.get("rope_theta") or config.get("rope_theta") or cls.rope_theta
        return cls(**{**known, "num_key_value_heads": heads, "rope_theta": theta})

    def to_json(self):
        """The dictionary of a config.json that transformers reads."""
        rope = {"rope_type": "default", "rope_theta": self.rope_theta}
        names = {"model_type": "doge", "architectures": ["DogeForCausalLM"], "hidden_act": "silu", "is_moe": False}
        return {**names, **dataclasses.asdict(self), "rope_parameters": rope}


class DogeLayer(nnx.Module):
    """One layer; ``residual`` and ``mlp_residual`` are a and b."""

    def __init__(self, config, *, dtype, param_dtype, implementation, rngs):
        width, inner = config.hidden_size, config.intermediate_size
        dtypes = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        norm = lambda: nnx.RMSNorm(width, epsilon=config.rms_norm_eps, **dtypes)
        linear = functools.partial(nnx.Linear, use_bias=config.mlp_bias, **dtypes)
        self.norm, self.mlp_norm = norm(), norm()
        self.residual, self.mlp_residual = (nnx.Param(jnp.ones(width, param_dtype)) for _ in range(2))
        self.attention = DynamicMaskAttention(
            width, config.num_attention_heads, config.keep_window_size, num_kv_heads=config.num_key_value_heads,
            rotary=functools.partial(rotary, base=config.rope_theta), norm_epsilon=config.rms_norm_eps,
            use_bias=config.attention_bias, implementation=implementation, **dtypes,
        )  # fmt: skip
        self.gate, self.up, self.down = linear(width, inner), linear(width, inner), linear(inner, width)

    def __call__(self, x, **options):
        y = self.attention(self.norm(x), **options)
        y, cache = y if isinstance(y, tuple) else (y, None)
        x = self.residual[...].astype(x.dtype) * x + y
        y = self.mlp_norm(x)
        y = self.down(nnx.silu(self.gate(y)) * self.up(y))
        return self.mlp_residual[...].astype(x.dtype) * x + y, cache


class Doge(nnx.Module):
    """A causal language model.

    Attributes:
      config: a :class:`DogeConfig`.
      embed, layers, norm, head: its parts; head is None if it is the transpose of embed.
    """

    def __init__(self, config, *, dtype=None, param_dtype=jnp.float32, implementation=None, rngs):
        """
        Args:
          config: a :class:`DogeConfig`.
          dtype: of the computation.
          param_dtype: of the parameters.
          implementation: as for :func:`jax_dma.attention`.
          rngs: :class:`flax.nnx.Rngs`.
        """
        dtypes = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.config = config
        self.embed = nnx.Embed(config.vocab_size, config.hidden_size, **dtypes)
        self.layers = nnx.List(
            [DogeLayer(config, implementation=implementation, **dtypes) for _ in range(config.num_hidden_layers)]
        )
        self.norm = nnx.RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, **dtypes)
        tied = config.tie_word_embeddings
        self.head = None if tied else nnx.Linear(config.hidden_size, config.vocab_size, use_bias=False, **dtypes)

    def __call__(self, tokens, *, valid=None, segment_ids=None, positions=None, cache=None):
        """
        Args:
          tokens: integers ``[*batch, T]``.
          valid, segment_ids, positions: as for :class:`~jax_dma.flax.DynamicMaskAttention`. transformers calls valid
            ``attention_mask``.
          cache: from :meth:`empty_cache`, for decoding.

        Returns:
          Logits ``[*batch, T, vocab_size]``; with a cache the pair of them and the new cache.
        """
        x, caches = self.embed(tokens), []
        for i, layer in enumerate(self.layers):
            of_layer = None if cache is None else cache[i]
            x, of_layer = layer(x, valid=valid, segment_ids=segment_ids, positions=positions, cache=of_layer)
            caches.append(of_layer)
        x = self.norm(x)
        logits = self.embed.attend(x) if self.head is None else self.head(x)
        return logits if cache is None else (logits, tuple(caches))

    def empty_cache(self, *batch, **options):
        """Caches of all layers; arguments as for :meth:`jax_dma.flax.DynamicMaskAttention.empty_cache`."""
        return tuple(layer.attention.empty_cache(*batch, **options) for layer in self.layers)


def from_doge(path, *, dtype=None, param_dtype=jnp.float32, implementation=None):
    """Reads a Doge checkpoint.

    Args:
      path: the folder with config.json and one or several .safetensors files.
      dtype, param_dtype, implementation: as for :class:`Doge`.

    Returns:
      A :class:`Doge`.

    Raises:
      ValueError: if the model is of a kind that is not supported (a mixture of experts, for example), or weights are
        missing, unknown or of another shape.
    """
    from safetensors.flax import load_file

    path = Path(path)
    config = DogeConfig.from_json(json.loads((path / "config.json").read_text()))
    weights = {}
    for file in sorted(path.glob("*.safetensors")):
        weights |= load_file(file)
    if not weights:
        raise ValueError(f"there is no .safetensors file in {path}")
    options = dict(dtype=dtype, param_dtype=param_dtype, implementation=implementation)
    model = nnx.eval_shape(lambda: Doge(config, **options, rngs=nnx.Rngs(0)))
    load(model, weights)
    return model


def to_doge(model, path):
    """Writes a checkpoint that :func:`from_doge` and transformers read: config.json and model.safetensors.

    Args:
      model: a :class:`Doge`.
      path: the folder, made if it is not there.
    """
    from safetensors.flax import save_file

    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(model.config.to_json(), indent=2) + "\n")
    save_file(weights_of(model), path / "model.safetensors", metadata={"format": "pt"})


def load(model, weights):
    """Puts weights into a model.

    Args:
      model: a :class:`Doge`, which is changed.
      weights: a dictionary of arrays by their names in Doge checkpoints, in their shapes there; any dtype.

    Raises:
      ValueError: if weights are missing, unknown or of another shape.
    """
    parameters = _parameters(model)
    if model.head is None:  # files may hold the same matrix twice
        weights = {name: x for name, x in weights.items() if name != "lm_head.weight"}
    missing, unknown = sorted(parameters.keys() - weights.keys()), sorted(weights.keys() - parameters.keys())
    if missing or unknown:
        raise ValueError(f"the weights are not those of this model: missing {missing}, unknown {unknown}")
    for name, (parameter, transposed) in parameters.items():
        x = jnp.asarray(weights[name])
        x = x.T if transposed else x
        if x.shape != parameter.shape:
            raise ValueError(f"{name} has shape {weights[name].shape}, which does not fit {parameter.shape}")
        parameter.set_value(x.astype(parameter.dtype))


def weights_of(model):
    """The reverse of :func:`load`.

    Args:
      model: a :class:`Doge`.

    Returns:
      A dictionary of its weights by their names in Doge checkpoints, in their shapes there.
    """
    return {name: x[...].T if transposed else x[...] for name, (x, transposed) in _parameters(model).items()}


def _parameters(model):
    """From names in a checkpoint to (parameter, whether it is the transpose there)."""
    found = {
        "model.embed_tokens.weight": (model.embed.embedding, False),
        "model.norm.weight": (model.norm.scale, False),
    }

    def linear(name, module):
        found[f"{name}.weight"] = module.kernel, True
        if module.bias is not None:
            found[f"{name}.bias"] = module.bias, False

    if model.head is not None:
        linear("lm_head", model.head)
    for i, layer in enumerate(model.layers):
        name, attention = f"model.layers.{i}", layer.attention
        for theirs, ours in (("q", "query"), ("k", "key"), ("v", "value"), ("dt", "score"), ("o", "out")):
            linear(f"{name}.self_attn.{theirs}_proj", getattr(attention, ours))
        for part in ("gate", "up", "down"):
            linear(f"{name}.mlp.{part}_proj", getattr(layer, part))
        found |= {
            f"{name}.self_attn.A": (attention.A, False),
            f"{name}.self_attn.q_norm.weight": (attention.query_norm.scale, False),
            f"{name}.self_attn.k_norm.weight": (attention.key_norm.scale, False),
            f"{name}.input_layernorm.weight": (layer.norm.scale, False),
            f"{name}.post_attention_layernorm.weight": (layer.mlp_norm.scale, False),
            f"{name}.input_residual": (layer.residual, False),
            f"{name}.post_attention_residual": (layer.mlp_residual, False),
        }
    return found
