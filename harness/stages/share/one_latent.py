"""Keys and values of all heads of a layer in one latent, beside a part of the keys that keeps its rotation (TransMLA)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from harness.errors import UserError, require
from harness.stages.bases import principal
from harness.stages.limits import Calibration
from harness.stages.share.sharing import Bases, Maps, Measured, Mixed, Share, Widths
from harness.stages.transfers import sent


@dataclass(frozen=True, kw_only=True)
class OneLatent(Share):
    """TransMLA (arXiv 2502.07864; kvpress: none) without training: MLA's layout, d_r + d_c numbers a token, made of GQA.

    A channel of all KV heads has one angle, so that heads may be mixed, channel by channel, before RoPE or after it. The mix
    is that of the largest energies (RoRoPE): of the H heads that it gives, the first `rope_heads` are stored rotated, d_r =
    rope_heads * D numbers. The others lose their rotation, which is the approximation: attention reads them as if every
    distance were 0. They (over the ratio of root mean squares: balanced) and the values are d_c principal components of a text.
    rope_heads: null for all heads: then no key loses its rotation, and only values are in the latent.
    fraction: (d_r + d_c) / (numbers of all keys and values). 1 with all heads rotated is the full cache in another basis.
    The matrices that read both parts belong to the cache here and are counted once; MLA folds them into projections.
    Differs from the authors' code: frequencies are not folded (FreqFold), so d_r is a multiple of the head dim; keys are
    balanced by root mean squares over all channels, not by the mean of channels' norms; queries keep their rank.
    """

    rope_heads: int | None = 1
    fraction: float = 0.5
    calibration: Calibration | None = None
    measured: Measured | None = field(default=None, repr=False, compare=False)  # set by `fitted`

    def __post_init__(self) -> None:
        ok = self.rope_heads is None or (isinstance(self.rope_heads, int) and self.rope_heads > 0)
        require(ok, "share.rope_heads", self.rope_heads, "a positive number of mixed heads that stay rotated, or null for all")
        ok = isinstance(self.fraction, int | float) and 0 < self.fraction <= 1
        require(ok, "share.fraction", self.fraction, "a share above 0 and at most 1")
        require(self.calibration is not None, "share.calibration", None, "the text on which heads are mixed")

    @property
    def pools(self) -> bool:
        return True

    @property
    def folds(self) -> bool:
        return True

    def rotated(self, heads: int) -> int:
        """How many mixed heads stay rotated, of so many KV heads."""
        return heads if self.rope_heads is None else self.rope_heads

    def widths(self, heads: int, d_key: int, d_value: int) -> Widths:
        """d_r and d_c of a layer; UserError if they are not possible."""
        most, whole = self.rotated(heads), heads * (d_key + d_value)
        if most > heads:
            raise UserError(f"share.rope_heads={most} is not possible for {heads} KV heads: allowed are 1 to {heads}, or null")
        latent = round(self.fraction * whole) - most * d_key
        if latent < 1:
            raise UserError(
                f"share.fraction={self.fraction:g} is not possible for {heads} KV heads of {d_key} and {d_value} channels with "
                f"{most} of them rotated: it must exceed {most * d_key / whole:g}"
            )
        return Widths(most * d_key, latent)

    def fitted(self, measured: Measured) -> OneLatent:
        """Itself with what `mixed` found, named turns.LAYER, vectors.LAYER and ratio.LAYER."""
        return replace(self, measured=measured)

    def maps(self, layer: int, heads: int, d_key: int, d_value: int, device: torch.device) -> Maps:
        """How a layer's keys and values become its two parts, and the way back; made, and sent to a device, once."""
        sizes = (layer, heads, d_key, d_value)
        if sizes not in self._maps:
            self._maps[sizes] = self._made(*sizes)
        (turns, up), down = self._maps[sizes]
        return Maps(Bases(sent(turns, device), sent(up, device)), sent(down, device))

    @cached_property
    def _maps(self) -> dict[tuple[int, int, int, int], Maps]:
        return {}

    def _made(self, layer: int, heads: int, d_key: int, d_value: int) -> Maps:
        assert self.measured is not None, "it is measured before anything is stored"
        turns, vectors, ratio = self.measured.mixed(layer, heads, d_key, d_value)
        wide = self.widths(heads, d_key, d_value).latent
        split, kept = heads * d_key, vectors[:, :wide]
        by_head = kept[:split].view(heads, d_key, wide), kept[split:].view(heads, d_value, wide)
        turns_HDR = turns[:, :, : self.rotated(heads)].transpose(0, 1).contiguous()
        up = torch.cat((by_head[0] * ratio, by_head[1]), 1).contiguous()
        return Maps(Bases(turns_HDR, up), torch.cat((by_head[0] / ratio, by_head[1]), 1).contiguous())

    def info(self) -> dict[str, object]:
        about = {"calibration": dict(self.measured.about)} if self.measured else {}
        return {"share": "one latent", "rope_heads": self.rope_heads, "fraction": self.fraction, **about}

    @property
    def words(self) -> str:
        most = "all" if self.rope_heads is None else self.rope_heads
        return f"one latent a layer ({self.fraction:g}, {most} of the heads rotated)"


def mixed(moment_EE: Tensor, heads: int, d_key: int, partners: Sequence[int], rotated: int) -> Mixed:
    """What `OneLatent` needs, from the second moments of a layer's keys without rotation beside its values, head by head.

    partners: of each key channel, the one that RoPE turns it with (itself where it is not turned): both are mixed alike.
    """
    moment = moment_EE.double().cpu()
    keys = moment[: heads * d_key, : heads * d_key].view(heads, d_key, heads, d_key)
    by_channel_DHH = torch.stack([keys[:, channel, :, channel] for channel in range(d_key)])
    turns = principal(by_channel_DHH + by_channel_DHH[list(partners)])[0]
    left = turns[:, :, :rotated].double()
    rotated_DHH = left @ left.mT  # what stays rotated of the keys of a channel
    unrotated = torch.eye(len(moment), dtype=torch.float64)
    for channel in range(d_key):
        at = torch.arange(heads) * d_key + channel
        unrotated[at[:, None], at] -= rotated_DHH[channel]
    # A little of everything that is not rotated: at full rank components span all of it, whatever the text held.
    rest = unrotated @ moment @ unrotated + 1e-8 * moment.diagonal().mean() * unrotated
    split = heads * d_key
    energies = rest.diagonal()[:split].sum() / max(1, split - rotated * d_key), rest.diagonal()[split:].mean()
    ratio = (energies[0] / energies[1]).sqrt() if rotated < heads else torch.ones(())
    scale = torch.cat((torch.full((split,), 1 / float(ratio)), torch.ones(len(moment) - split))).double()
    vectors, _ = principal(scale[:, None] * rest * scale)
    return Mixed(turns.contiguous(), vectors, ratio.float())
