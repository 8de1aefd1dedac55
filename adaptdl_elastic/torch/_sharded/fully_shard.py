"""Use torch's private interface of FSDP2. No other module does.

torch cannot change the device mesh of a model that `fully_shard` was applied to. `install` does so for one
parameter: torch's own `_init_sharded_param` computes the new layout from a tensor without memory (`meta`),
and `torch.utils.swap_tensors` keeps the parameter object that the script and the optimizer hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from adaptdl_elastic.torch._sharded.layout import Layout

TESTED = ("2.13", "2.14")
"""Releases of torch whose private interface was tested."""

Parameter = Any
"""torch's `FSDPParam`: the handle of a sharded parameter."""

Gradients = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Sharded parameters, each with a gradient of it or a part of one, in any shape."""


def why_not(model: torch.nn.Module) -> str | None:
    """Return why the number of replicas of this model cannot be changed; None if it can."""
    release = ".".join(torch.__version__.split(".")[:2])
    if release not in TESTED:
        return f"it needs torch {' or '.join(TESTED)}, and this is torch {torch.__version__}"
    if not isinstance(model, FSDPModule):
        return "fully_shard was not applied to the model itself: call fully_shard(model) last"
    handles = [handle for group in groups(model) for handle in group.fsdp_params]
    held = {id(handle.sharded_param) for handle in handles}
    loose = [name for name, param in model.named_parameters() if id(param) not in held]
    if loose:
        return f"parameter {loose[0]!r} is not sharded: leave out ignored_params"
    for group in groups(model):
        for info in (group.mesh_info, group.post_forward_mesh_info):
            if info is not None and info.mesh != mesh_info(group.device).mesh:
                return (
                    f"one shard per replica is supported, in the order of ranks, and this mesh is "
                    f"{info.mesh}: give fully_shard no mesh, and True or False as reshard_after_forward"
                )
    for handle in handles:
        if handle.is_dtensor:
            return "its parameters were DTensors before fully_shard, as in tensor parallelism"
        if handle.fsdp_placement != Shard(0):
            return "parameters must be sharded in their first dimension: leave out shard_placement_fn"
        if handle.offload_to_cpu:
            return "offloading to the CPU is not supported: leave out offload_policy"
    return None


def groups(model: torch.nn.Module) -> Iterator[Any]:
    """Yield torch's groups of parameters that are gathered together, in the order of the modules."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield from module._get_fsdp_state()._fsdp_param_groups


def synchronises(groups: Iterable[Any]) -> bool:
    """Return whether every backward pass adds up the gradients of these `groups` over the replicas."""
    return all(group.reduce_grads for group in groups)


def parameters(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the sharded parameters, which are the same objects whether they are gathered at present or not.

    While a module's parameters are gathered, as after a forward pass without a backward pass,
    `model.parameters()` yields other objects.
    """
    for group in groups(model):
        for handle in group.fsdp_params:
            yield handle.sharded_param


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this replica's part of a sharded tensor, without a copy."""
    assert isinstance(tensor, DTensor)
    return tensor._local_tensor.detach()


def with_part(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return a sharded tensor of the layout of `tensor`, with `part` as this replica's part."""
    assert isinstance(tensor, DTensor)
    return DTensor.from_local(
        part,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def keep(handle: Parameter, tensor: torch.Tensor, part: torch.Tensor) -> None:
    """Replace this replica's part of a sharded tensor by one of another size, until `install` is called."""
    if tensor is handle.sharded_param:
        handle._sharded_param_data = part.view(-1)
    tensor._local_tensor = part  # type: ignore[attr-defined]


def mesh_info(device: torch.device, group: Any = None) -> Any:
    """Return torch's description of a mesh of the replicas of a process group; None: of all replicas."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

    if group is None:
        mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    else:
        mesh = DeviceMesh.from_group(group, device.type)
    return FSDPMeshInfo(mesh, shard_mesh_dim=0)


def lay_out(handle: Parameter, info: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Give a parameter the layout of a mesh, and return memory for its new part.

    Returns:
        The memory that torch gathers, which may end with rows of padding, and a view of it without them.
    """
    old, whole = handle.sharded_param, handle._orig_size
    part, device = local(old), local(old).device
    blank = torch.nn.Parameter(
        torch.empty(whole, dtype=part.dtype, device="meta"), requires_grad=old.requires_grad
    )
    blank._fsdp_orig_uid = handle._orig_param_uid  # type: ignore[attr-defined]
    handle._init_sharded_param(blank, device, None, info)
    # until `install`
    handle.sharded_param = old
    padded = torch.zeros(handle.padded_sharded_param_size, dtype=part.dtype, device=device)
    return padded, padded.narrow(0, 0, handle.sharded_size[0])


def install(handle: Parameter, padded: torch.Tensor, part: torch.Tensor) -> None:
    """Make `part` the parameter's part, in the layout that `lay_out` has set.

    Args:
        handle: The parameter.
        padded: Memory from `lay_out`.
        part: View of it from `lay_out`, filled by now.
    """
    old = handle.sharded_param
    old.grad = None
    new = torch.nn.Parameter(handle.to_sharded_dtensor(part), requires_grad=old.requires_grad)
    torch.utils.swap_tensors(old, new)  # type: ignore[no-untyped-call]
    handle.sharded_param = old
    handle._setattr_on_modules(old)
    handle._sharded_param_data = padded.view(-1)
    handle.all_gather_outputs = []
    handle._unsharded_inner_tensors = []
    if hasattr(handle, "_unsharded_param"):
        del handle._unsharded_param


def sharded(handle: Parameter, part: torch.Tensor) -> torch.Tensor:
    """Return a sharded tensor of the parameter's present layout, e.g. of an optimizer's state."""
    tensor: torch.Tensor = handle.to_sharded_dtensor(part)
    return tensor


def use_mesh(group: Any, info: Any) -> None:
    """Let a group of parameters, all of which were installed, communicate on a mesh."""
    if group.post_forward_mesh_info is not None:
        group.post_forward_mesh_info = info
    group.mesh_info = info
    for handle in group.fsdp_params:
        if handle.post_forward_mesh_info is not None:
            handle.post_forward_mesh_info = info


class GradientObserver(Protocol):
    """Define what is told of each group of parameters whose gradients a backward pass adds up."""

    @property
    def measuring(self) -> bool:
        """Whether `own`, `summed` and `unknown` are to be called. The same on all replicas."""

    @property
    def by_rows(self) -> bool:
        """Whether `own` is to be called with this replica's rows of all replicas' gradients."""

    def own(self, gradients: Gradients) -> None:
        """Measure gradients before they are added up.

        Args:
            gradients: This replica's weighed gradients of whole parameters. If `by_rows`, those of the rows
                that this replica holds, whose squares are the sums over replicas of the squares.
        """

    def summed(self, passed: Gradients, whole: Gradients) -> None:
        """Measure this replica's rows of the sums.

        Args:
            passed: Sums of this backward pass.
            whole: Those sums and the gradients that earlier passes have left; `passed` itself if there are
                none.
        """

    def unknown(self) -> None:
        """Record that it is not known which parameters the gradients belong to."""


class CopyLinks(Protocol):
    """Define how the parts of a model and their copies communicate; see `links.Links`."""

    layout: Layout

    def run(self, collective: Callable[[], Any], result: torch.Tensor) -> None:
        """Carry out a collective that fills `result`."""

    def scatter(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        """Add up `whole` over the replicas that hold one copy, and fill `part` with this replica's part."""

    def add_copies(self, part: torch.Tensor) -> None:
        """Add up a tensor over the replicas that hold the same part, in place; nothing with one copy."""


def observe(
    model: torch.nn.Module,
    observer: GradientObserver,
    reducing: Callable[[], None],
    weigh: Callable[[torch.Tensor], None],
    links: CopyLinks | None = None,
) -> None:
    """Let gradients be sums over replicas, not means.

    Args:
        model: The model.
        observer: Measures the gradients.
        reducing: Is called before gradients are added up, maybe several times.
        weigh: Multiplies this replica's gradients in place.
        links: What the parts and their copies communicate by; None: there are no copies.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

    class Gather(DefaultAllGather):
        def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> None:
            assert links is not None
            begin = partial(super().__call__, output_tensor, input_tensor, group, True)
            links.run(begin, output_tensor)

    class Observed(DefaultReduceScatter):
        # those with a gradient in the present call
        handles: list[Parameter]

        def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            # torch allocates memory for the sum on a single replica too, where it does not call `__call__`.
            reducing()
            return super().allocate(*args, **kwargs)

        def __call__(
            self, output_tensor: Any, input_tensor: Any, group: Any, *args: Any, **kwargs: Any
        ) -> Any:
            weigh(input_tensor)
            sizes, by_rows = self.sizes(output_tensor), observer.by_rows
            if sizes and not by_rows:
                columns = input_tensor.view(group.size(), -1).split(sizes, dim=1)
                observer.own(
                    [(one.sharded_param, part) for one, part in zip(self.handles, columns, strict=True)]
                )
            work = None
            if links is None:
                work = super().__call__(output_tensor, input_tensor, group, *args, **kwargs)
                # nothing needs `input_tensor` any more
                squares = _squares(input_tensor) if sizes and by_rows else None
            else:
                squares = _squares(input_tensor.clone()) if sizes and by_rows else None
                links.scatter(output_tensor, input_tensor)
            if squares is not None:
                found = torch.empty_like(output_tensor, dtype=squares.dtype)
                if links is None:
                    torch.distributed.reduce_scatter_single(found, squares, group=group)
                else:
                    links.scatter(found, squares)
                    links.add_copies(found)
                observer.own(_rows(self.handles, sizes, found.sqrt_()))
            if links is None or links.layout.copies == 1:
                self.summed(output_tensor, sizes)
            return work

        def sizes(self, output: torch.Tensor) -> list[int]:
            """Return the elements of each parameter in the sums; [] if they are not measured."""
            sizes = [handle.padded_sharded_param_size.numel() for handle in self.handles]
            if observer.measuring and sum(sizes) != output.numel():
                observer.unknown()
                return []
            return sizes if observer.measuring else []

        def summed(self, output: torch.Tensor, sizes: list[int]) -> None:
            """Measure the sums, if they are measured."""
            if sizes:
                passed = _rows(self.handles, sizes, output)
                added = any(param.grad is not None for param, _ in passed)
                observer.summed(passed, [_with_present(*one) for one in passed] if added else passed)

        def add_copies(self, output: torch.Tensor) -> None:
            """Add up this replica's rows over the replicas that hold the same."""
            if links is None or links.layout.copies == 1:
                return
            sizes = self.sizes(output)
            if links.layout.parts == 1:
                # torch has only copied this replica's gradients
                weigh(output)
                if sizes:
                    found = output
                    if observer.by_rows:
                        found = _squares(output.clone())
                        links.add_copies(found)
                        found.sqrt_()
                    observer.own(_rows(self.handles, sizes, found))
            links.add_copies(output)
            self.summed(output, sizes)

    for module in model.modules():
        if isinstance(module, FSDPModule):
            communication = Observed()
            for group in module._get_fsdp_state()._fsdp_param_groups:
                _note_gradients(group, communication, weigh)
                if links is not None:
                    group._all_reduce_hook = communication.add_copies
            module.set_custom_reduce_scatter(communication)
            if links is not None:
                module.set_custom_all_gather(Gather())
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _note_gradients(group: Any, communication: Any, weigh: Callable[[torch.Tensor], None]) -> None:
    """Let `communication.handles` be the parameters whose gradients torch is about to add up.

    A single replica's gradients are weighed here, because torch does not call `communication` for them.
    """
    original = group.post_backward

    def post_backward(*unused: Any) -> None:
        communication.handles = [
            handle
            for handle in group.fsdp_params
            if hasattr(handle, "_unsharded_param")
            and (handle.unsharded_accumulated_grad is not None or handle.unsharded_param.grad is not None)
        ]
        if group.reduce_grads and torch.distributed.get_world_size() == 1:
            for handle in communication.handles:
                if handle.unsharded_param.grad is not None:
                    weigh(handle.unsharded_param.grad)
        original(*unused)

    group.post_backward = post_backward


def _rows(handles: list[Parameter], sizes: list[int], flat: torch.Tensor) -> Gradients:
    """Return this replica's rows of each parameter, without the padding, from a flat tensor of all."""
    return [
        (handle.sharded_param, part[: handle.sharded_size.numel()])
        for handle, part in zip(handles, torch.split(flat, sizes), strict=True)
    ]


def _squares(gradients: torch.Tensor) -> torch.Tensor:
    """Return squared gradients, which overwrite `gradients` unless their type has too small a range."""
    return gradients.float().square_() if gradients.dtype == torch.float16 else gradients.square_()


def _with_present(param: torch.Tensor, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a parameter, and the sum of a new part of its gradient and the present one."""
    return param, part if param.grad is None else local(param.grad).reshape(-1) + part
