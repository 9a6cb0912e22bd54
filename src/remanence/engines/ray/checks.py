"""Can the engine `ray` run a task? This is checked without connecting to a cluster."""

from __future__ import annotations

from remanence.core.errors import InputError, unknown
from remanence.engines.ray.serialization import pickle_task
from remanence.engines.stack_checks import check_stackable
from remanence.training.task import TrainingTask

INNER = ("sequential", "vectorized")  # engines inside a worker


def check_ray(
    task: TrainingTask,
    timeout: float,
    *,
    inner: str,
    cpus: float,
    gpus: float,
    retries: int,
    device: str = "",
) -> None:
    """Raise `InputError` where Ray's workers could not run a task; see `RayEngine`."""
    require_ray()
    _check_options(timeout, inner, cpus, gpus, retries, device)
    if gpus and (device or task.info.device.type) == "cpu":
        raise InputError(
            f"engine ray: ray.gpus={gpus:g} means nothing to workers that compute on"
            " the CPU: leave it out, or set device to cuda"
        )
    if inner == "vectorized":
        check_stackable(task)
    pickle_task(task)


def require_ray() -> None:
    """Raise `InputError` where the package ray is missing."""
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise InputError(
            f'engine ray needs the package ray ({error}): pip install "remanence-fl[ray]"'
        ) from error


def _check_options(
    timeout: float, inner: str, cpus: float, gpus: float, retries: int, device: str
) -> None:
    if inner and inner not in INNER:
        raise unknown("inner engine of ray", inner, INNER)
    if device not in ("", "cpu", "cuda"):
        raise InputError(
            f"engine ray: device must be cpu or cuda, not {device!r}: a worker takes"
            " whichever GPU Ray gives it"
        )
    if cpus <= 0 or (cpus > 1 and cpus != int(cpus)):
        raise InputError(
            f"engine ray: a worker cannot have {cpus:g} cores: ray.cpus is a whole"
            " number, or a fraction of 1 for workers that share a core"
        )
    if not 0 <= gpus <= 1:
        raise InputError(
            f"engine ray: a worker cannot use {gpus:g} GPUs: ray.gpus is at most 1,"
            " for a worker computes on one; start more workers"
        )
    if timeout < 0 or retries < 0:
        raise InputError(f"engine ray: timeout={timeout} and retries={retries} must be at least 0")
