"""Which stacks can merge: merging is done in exact numbers, and a merged token has one position."""

from __future__ import annotations

from harness.errors import UserError
from harness.stages.codec.base import Codec
from harness.stages.codec.exact import Exact
from harness.stages.merge.parting import Merge, acts


def check(merge: Merge | None, evicts: bool, phase: str, positions: str, rope: str, **codecs: Codec) -> None:
    """Refuse (UserError) a stack in which this merge cannot work. codecs: of keys and values."""
    if merge is None:
        return
    name = type(merge).__name__
    if not evicts:
        raise UserError(f"compress.merge={name} needs a compress.keep: where nothing is evicted, nothing can be merged")
    if not acts(merge):
        return
    if positions == "cache" and "keys" in merge.changes:
        raise UserError(
            f"compress.positions='cache' with compress.merge={name} is not possible: keys stored without rotation would be "
            "matched and averaged as no query sees them; legal are positions=original, or a merge of values alone (cam)"
        )
    if rope == "pre" and phase != "prefill" and "keys" in merge.changes:
        raise UserError(
            f"compress.rope='pre' with compress.merge={name} and compress.phase={phase!r} is not possible: stored keys without "
            "rotation would be matched with new ones; legal are rope=post, phase=prefill, or a merge of values alone (cam)"
        )
    lossy = [role for role in merge.changes if type(codecs[role]) is not Exact]
    if phase != "prefill" and lossy:
        raise UserError(
            f"compress.phase={phase!r} with compress.merge={name} and compress.{lossy[0]}={codecs[lossy[0]].name} is not "
            "possible: every eviction would decode, change and encode stored tokens again, each time with a new error; legal "
            f"are phase=prefill (merge, then encode) or exact {' and '.join(merge.changes)}"
        )
