"""Find a provider by its name, and make it.

`adaptdl autoscale --provider NAME -o KEY=VALUE` makes the provider of that name. Another package adds one by
an entry point in the group "adaptdl_elastic.providers" to a `ProviderFactory`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from adaptdl_elastic.autoscaler.providers.base import Provider, ProviderError, ProviderOptionError
from adaptdl_elastic.extensions import ExtensionError, ExtensionPoint

_HERE = "adaptdl_elastic.autoscaler.providers"

_OURS = {name: f"{_HERE}.{name}.provider:from_request" for name in ("ec2", "slurm")}

PROVIDERS = ExtensionPoint("provider", "adaptdl_elastic.providers", _OURS)


@dataclass(frozen=True)
class ProviderRequest:
    """What the command line says about a provider.

    Attributes:
        options: options of the provider, as text: `-o KEY=VALUE`.
        prices: on-demand price per hour by instance type, in the currency of the limits.
        slots: replicas per node; None: the provider finds the number itself.
        max_nodes: most nodes; None: the provider's own bound.
        owner: cluster that controls the nodes, for providers that can note it.
        seize: take nodes that another cluster controls.
        store: environment variables by which the agent of a new node reaches the store.
    """

    options: Mapping[str, str] = field(default_factory=dict)
    prices: Mapping[str, float] = field(default_factory=dict)
    slots: int | None = None
    max_nodes: int | None = None
    owner: str = ""
    seize: bool = False
    store: Mapping[str, str] = field(default_factory=dict, repr=False)

    def known(self, *names: str) -> dict[str, str]:
        """Return the options.

        Raises:
            ProviderOptionError: an option is not among `names`.
        """
        for name in self.options:
            if name not in names:
                allowed = ", ".join(names) or "none"
                raise ProviderOptionError(f"there is no option {name!r} (-o); there are: {allowed}")
        return dict(self.options)


ProviderFactory = Callable[[ProviderRequest], Provider]


def make_provider(name: str, request: ProviderRequest) -> Provider:
    """Return the provider called `name`.

    Raises:
        ProviderOptionError: there is none of that name, or an option is invalid.
        ProviderError: it cannot be made, or its factory returns no provider.
    """
    try:
        factory: ProviderFactory = PROVIDERS.load(name)
    except ExtensionError as error:
        raise ProviderOptionError(str(error)) from error
    made = factory(request)
    if not isinstance(made, Provider):
        raise ProviderError(f"the provider {name!r} gives {made!r}, which is no Provider")
    return made
