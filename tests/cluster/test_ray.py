"""A sweep on a real Ray, in a network and process namespace that ends with it; `make test-ray`, for Ray is large."""

from __future__ import annotations

from pathlib import Path

from tests.support.sweeping import Sweep, survives

NAMESPACE = (
    "unshare",
    "--net",
    "--pid",
    "--fork",
    "--mount-proc",
    "--kill-child",
    "bash",
    "-c",
    'ip link set lo up; exec "$@"',
    "-",
)


def test_ray_survives_its_jobs(tmp_path: Path) -> None:
    survives(Sweep(tmp_path), ["hydra/launcher=ray", "+hydra.launcher.init.num_cpus=2"], within=NAMESPACE)
