"""What codecs have in common that hand another codec something else than keys or values to encode."""

from __future__ import annotations

from harness.errors import require
from harness.stages.codec.base import Codec


class OverInner(Codec):
    """A codec over an `inner` one: tokens fall into that one's blocks."""

    inner: Codec

    @property
    def block(self) -> int:
        return self.inner.block

    @property
    def flush(self) -> int:
        return self.inner.flush

    def require_plain(self, *, beside: bool = True) -> None:
        """Refuse (UserError) an inner codec that calibrates, joins heads or keeps exact tokens. beside: what else must hold."""
        inner = self.inner
        plain = inner.calibration is None and not (inner.joint or inner.residual or inner.sinks)
        said = "one without calibration, residual or sinks of its own, such as exact, int8, int4_token with residual 0"
        require(plain and beside, "codec.inner", inner.name, said)
