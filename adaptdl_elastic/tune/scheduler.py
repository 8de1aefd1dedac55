"""AdaptDL's trial scheduler by its name."""

from __future__ import annotations

from typing import Any

from ray.tune.schedulers import FIFOScheduler, TrialScheduler


class AdaptDLScheduler(TrialScheduler):
    """Decide which trials run and which end early, as another scheduler of Ray Tune does.

    AdaptDL's scheduler also gave replicas to trials, by stopping and starting them. Here the coordinator of
    each node does that, in place, whatever the scheduler. So this class only passes everything on.

    Args:
        base: A scheduler of Ray Tune, for example `ASHAScheduler()`; None: trials run to their end.
    """

    def __init__(self, base: TrialScheduler | None = None) -> None:
        self._base = base or FIFOScheduler()

    def __getattr__(self, name: str) -> Any:
        if name == "_base":  # while this object is unpickled
            raise AttributeError(name)
        return getattr(self._base, name)

    def _passed_on(name: str) -> Any:
        def method(self: AdaptDLScheduler, *args: Any, **kwargs: Any) -> Any:
            return getattr(self._base, name)(*args, **kwargs)

        method.__name__, method.__doc__ = name, f"Pass on to `{name}` of the base scheduler."
        return method

    set_search_properties = _passed_on("set_search_properties")
    on_trial_add = _passed_on("on_trial_add")
    on_trial_error = _passed_on("on_trial_error")
    on_trial_result = _passed_on("on_trial_result")
    on_trial_complete = _passed_on("on_trial_complete")
    on_trial_remove = _passed_on("on_trial_remove")
    choose_trial_to_run = _passed_on("choose_trial_to_run")
    debug_string = _passed_on("debug_string")
    save = _passed_on("save")
    restore = _passed_on("restore")

    @property
    def metric(self) -> str | None:
        """The metric that the base scheduler compares."""
        metric: str | None = self._base.metric
        return metric

    @property
    def supports_buffered_results(self) -> bool:
        """Whether the base scheduler can take several results at a time."""
        return bool(self._base.supports_buffered_results)
