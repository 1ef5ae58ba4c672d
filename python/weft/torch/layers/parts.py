"""What layers are made of: a linear map with a norm before it, the norm of queries and keys, the MLP, rotary embedding."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from .words import one_of

InitMethod = Callable[[Tensor], Any]


def usual_init(weight: Tensor) -> None:
    """Transformer Engine's: normal, of standard deviation 0.023."""
    torch.nn.init.normal_(weight, mean=0.0, std=0.023)


class Norm(NamedTuple):
    """A kind of normalisation."""

    kind: str
    eps: float
    zero_centered: bool = False


def normed(norm: Norm, x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor]) -> Tensor:
    """x, normalised over its last dimension."""
    if norm.kind == "L2Normalization":
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + norm.eps)).to(x.dtype)
    assert weight is not None
    gamma = weight + 1 if norm.zero_centered else weight
    if norm.kind == "RMSNorm":
        return F.rms_norm(x, gamma.shape, gamma, norm.eps)
    return F.layer_norm(x, gamma.shape, gamma, bias, norm.eps)


class Part(torch.nn.Module):
    """A module with parameters of its own, each with what initialises it."""

    def __init__(self, dtype: Optional[torch.dtype], device: Any) -> None:
        super().__init__()
        self._place = dict(dtype=dtype, device=device)
        self._inits: Dict[str, InitMethod] = {}

    def add(self, name: str, shape: Tuple[int, ...], init: Optional[InitMethod]) -> None:
        """A parameter; None in its place if there is nothing to initialise it with."""
        self.register_parameter(name, None if init is None else Parameter(torch.empty(shape, **self._place)))
        if init is not None:
            self._inits[name] = init

    def add_norm(self, norm: Optional[Norm], features: int, weight: str, bias: str) -> None:
        """Weight and bias of a norm."""
        known = norm is not None and norm.kind != "L2Normalization"
        one = torch.nn.init.zeros_ if norm is not None and norm.zero_centered else torch.nn.init.ones_
        self.add(weight, (features,), one if known else None)
        self.add(bias, (features,), torch.nn.init.zeros_ if norm is not None and norm.kind == "LayerNorm" else None)

    def reset_parameters(self) -> None:
        """Initialises all parameters anew: for modules that were made on the device meta."""
        with torch.no_grad():
            for name, init in self._inits.items():
                init(getattr(self, name))

    def _load_from_state_dict(self, state_dict: Dict[str, Any], prefix: str, *args: Any) -> None:
        state_dict.pop(f"{prefix}_extra_state", None)  # FP8 scales in checkpoints of Transformer Engine
        super()._load_from_state_dict(state_dict, prefix, *args)


class Linear(Part):
    """x·Wᵀ + b, with a norm before it if there is one; rows of W are one parameter, or one for each name of `split`."""

    def __init__(self, inputs: int, outputs: int, *, init: InitMethod, bias: bool, norm: Optional[Norm] = None,
                 split: Optional[Dict[str, int]] = None, dtype: Optional[torch.dtype], device: Any) -> None:
        super().__init__(dtype, device)
        self.norm, self.shape = norm, (outputs, inputs)
        if norm is not None:
            self.add_norm(norm, inputs, "layer_norm_weight", "layer_norm_bias")
        names = {"": outputs} if split is None else {f"{name}_": size for name, size in split.items()}
        self.weights: List[str] = [f"{name}weight" for name in names]
        self.biases: List[str] = [f"{name}bias" for name in names]
        for name, size in names.items():
            self.add(f"{name}weight", (size, inputs), init)
            self.add(f"{name}bias", (size,), torch.nn.init.zeros_ if bias else None)
        self.reset_parameters()

    def _whole(self, names: List[str]) -> Any:
        parts = [getattr(self, name) for name in names]
        return parts[0] if len(parts) == 1 or parts[0] is None else torch.cat(parts)

    def forward(self, x: Tensor) -> Tensor:
        """The map of [..., inputs] to [..., outputs]."""
        if self.norm is not None:
            x = normed(self.norm, x, self.layer_norm_weight, self.layer_norm_bias)
        return F.linear(x, self._whole(self.weights), self._whole(self.biases))

    def extra_repr(self) -> str:
        """Sizes, for print(model)."""
        return f"{self.shape[1]}, {self.shape[0]}{'' if self.norm is None else f', {self.norm.kind}'}"


class HeadNorm(Part):
    """A norm of each head's queries or keys."""

    def __init__(self, norm: Norm, features: int, *, dtype: Optional[torch.dtype], device: Any) -> None:
        super().__init__(dtype, device)
        self.norm = norm
        self.add_norm(norm, features, "weight", "bias")
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Of [..., heads, features], over features."""
        return normed(self.norm, x, self.weight, self.bias).to(x.dtype)  # autocast gives f32


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


# By name: (the function, whether its result multiplies a second half of what fc1 gives).
ACTIVATIONS: Dict[str, Tuple[Callable[[Tensor], Tensor], bool]] = {
    "gelu": (_gelu, False), "geglu": (_gelu, True), "relu": (F.relu, False), "reglu": (F.relu, True),
    "silu": (F.silu, False), "swiglu": (F.silu, True), "qgelu": (_quick_gelu, False), "qgeglu": (_quick_gelu, True),
    "srelu": (_squared_relu, False), "sreglu": (_squared_relu, True), "glu": (torch.sigmoid, True),
}


class NormMlp(Part):
    """Norm, fc1, activation, fc2. Of gated activations fc1 gives two halves: f(first) · second."""

    def __init__(self, hidden: int, inner: int, *, norm: Norm, activation: str, bias: bool, init: InitMethod,
                 output_init: InitMethod, dtype: Optional[torch.dtype], device: Any) -> None:
        super().__init__(dtype, device)
        self.norm, self.activation = norm, one_of("activation", activation, ACTIVATIONS)
        wide = 2 * inner if ACTIVATIONS[activation][1] else inner
        zeros = torch.nn.init.zeros_ if bias else None
        self.add_norm(norm, hidden, "layer_norm_weight", "layer_norm_bias")
        self.add("fc1_weight", (wide, hidden), init)
        self.add("fc1_bias", (wide,), zeros)
        self.add("fc2_weight", (hidden, inner), output_init)
        self.add("fc2_bias", (hidden,), zeros)
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Of [..., hidden]."""
        function, gated = ACTIVATIONS[self.activation]
        wide = F.linear(normed(self.norm, x, self.layer_norm_weight, self.layer_norm_bias), self.fc1_weight, self.fc1_bias)
        if gated:
            first, second = wide.chunk(2, -1)
            wide = function(first) * second
        else:
            wide = function(wide)
        return F.linear(wide, self.fc2_weight, self.fc2_bias)

    def extra_repr(self) -> str:
        """Sizes, for print(model)."""
        return f"{self.fc2_weight.shape[0]}, {self.fc2_weight.shape[1]}, {self.norm.kind}, {self.activation}"


def angles_of(positions: Tensor, base: float, dim: int, interleaved: bool, dtype: torch.dtype) -> Tensor:
    """Angles [..., dim] of rotary embedding at positions [...]: position / base^(2i/dim)."""
    steps = torch.arange(0, dim, 2, device=positions.device, dtype=dtype) / dim
    angles = positions[..., None].to(dtype) / base**steps
    return angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)


def rotate(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """x [..., heads, dim] with its first angles.shape[-1] features turned by angles [..., features]; rounded once."""
    turned = angles.shape[-1]
    wide = x[..., :turned].to(angles.dtype)
    if interleaved:
        other = torch.stack((-wide[..., 1::2], wide[..., ::2]), -1).flatten(-2)
    else:
        first, second = wide.chunk(2, -1)
        other = torch.cat((-second, first), -1)
    angles = angles[..., None, :]
    new = (wide * angles.cos() + other * angles.sin()).to(x.dtype)
    return new if turned == x.shape[-1] else torch.cat((new, x[..., turned:]), -1)
