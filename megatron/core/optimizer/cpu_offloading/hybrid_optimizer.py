"""Amends upstream's ``HybridDeviceOptimizer``, so that it goes on where its checkpoint stopped.

Names used here: an *inner* parameter is what a sub-optimizer steps for one of the hybrid
optimizer's own parameters: its fp32 copy, its copy in host memory, or the parameter itself.
"""

import types
from contextlib import contextmanager

import torch

import megatron_overlay

upstream = megatron_overlay.upstream(__name__)


def _keep_own_name(cls: type) -> None:
    # Upstream's methods say super(HybridDeviceOptimizer, self) and mean their own class; by that
    # name they would find the one below, and call themselves for ever. They look the name up in
    # this module, so nothing that the class below overrides or passes to super() changes it.
    names = {**globals(), cls.__name__: cls}
    for key, method in vars(cls).copy().items():
        if isinstance(method, types.FunctionType) and cls.__name__ in method.__code__.co_names:
            own = types.FunctionType(
                method.__code__, names, key, method.__defaults__, method.__closure__
            )
            own.__kwdefaults__, own.__doc__ = method.__kwdefaults__, method.__doc__
            setattr(cls, key, own)


_keep_own_name(upstream.HybridDeviceOptimizer)


class HybridDeviceOptimizer(upstream.HybridDeviceOptimizer):  # type: ignore[name-defined]
    """Upstream's, with inner parameters, steps and devices right after every kind of load."""

    param_to_fp32_param: dict

    def step(self, closure=None):
        """Upstream's; the first step starts from the parameters as they are now.

        An optimizer that hasn't stepped has nothing of its own to keep, and its inner parameters
        are older than the weights when a checkpoint was loaded without optimizer state.
        """
        if not self.state:
            self.update_fp32_param_by_new_param()
        return super().step(closure)

    @torch.no_grad()
    def update_fp32_param_by_new_param(self):
        """Upstream's, for every inner parameter: fp32 ones in host memory are copies as well."""
        super().update_fp32_param_by_new_param()
        for param, inner_param in self.param_to_inner_param.items():
            if inner_param is not param and param not in self.param_to_fp32_param:
                inner_param.copy_(param)

    def dummy_step(self):
        """Upstream's, which allocates the state; all else is afterwards what it was.

        Moments are zero and no step has been counted. The run's own gradients take no part: before
        the loss scale of fp16 has come down they are infinite.
        """
        with (
            self._parameters_held(),
            self._gradients_aside(),
            torch.random.fork_rng([torch.cuda.current_device()]),
        ):
            super().dummy_step()
        for optimizer in self.sub_optimizers:
            for group in optimizer.param_groups:
                group.pop('step', None)
            for state in optimizer.state.values():
                for key, value in state.items():
                    if key != 'master_param' and isinstance(value, torch.Tensor):
                        value.zero_()

    @contextmanager
    def _parameters_held(self):
        held = [(group, group['lr'], group['weight_decay']) for group in self.param_groups]
        for group in self.param_groups:
            group['lr'] = group['weight_decay'] = 0.0
        try:
            yield
        finally:
            for group, lr, weight_decay in held:
                group['lr'], group['weight_decay'] = lr, weight_decay

    @contextmanager
    def _gradients_aside(self):
        """Inside no parameter has a gradient; afterwards each has what it had, and nothing else."""
        names = ('grad', 'decoupled_grad')
        params = {*self.param_to_inner_param, *self.inner_param_to_orig_param}
        held = [
            (param, name, getattr(param, name))
            for param in params
            for name in names
            if hasattr(param, name)
        ]
        for param, name, _ in held:
            delattr(param, name)
        try:
            yield
        finally:
            self.cpu_copy_map_grad.clear()
            for param in params:
                param.grad = None
            for param, name, gradient in held:
                setattr(param, name, gradient)

    def state_dict(self):
        """Upstream's; the groups say how many steps were taken, also when FusedAdam counts them."""
        state_dict = super().state_dict()
        if self.steps_taken is not None:
            for group in state_dict['param_groups']:
                group['step'] = self.steps_taken
        return state_dict

    @property
    def own_settings(self) -> set[str]:
        """What torch keeps in the groups of this optimizer's constructor arguments.

        They belong to the run, and the classes among them can't be read back safely from a file.
        """
        return self.defaults.keys() - self.sub_optimizer_kwargs.keys()

    @property
    def steps_taken(self) -> int | None:
        """Steps counted by the sub-optimizers; None where none of them counts or has stepped."""
        for optimizer in self.sub_optimizers:
            for counted in (*optimizer.state.values(), *optimizer.param_groups):
                if 'step' in counted:
                    return int(counted['step'])
        return None

    def _register_load_state_dict_hooks(self):
        super()._register_load_state_dict_hooks()
        self.register_load_state_dict_post_hook(HybridDeviceOptimizer._settle_loaded_steps)

    def _settle_loaded_steps(self) -> None:
        # From here on each sub-optimizer counts in its own place. Left in the hybrid optimizer's
        # groups, the loaded step would be copied over FusedAdam's count before every step.
        for group in self.param_groups:
            group.pop('step', None)
        for optimizer in self.sub_optimizers:
            if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
                for group in optimizer.param_groups:
                    group.pop('step', None)
                for state in optimizer.state.values():
                    state['step'] = state['step'].clone()
            else:
                for state in optimizer.state.values():
                    state.pop('step', None)

    def _update_fp32_params_by_new_state(self):
        """Upstream's, for every inner parameter: those of fp32 parameters aren't fp32 copies."""
        fp32_copies, self.param_to_fp32_param = self.param_to_fp32_param, self.param_to_inner_param
        try:
            super()._update_fp32_params_by_new_state()
        finally:
            self.param_to_fp32_param = fp32_copies

    def _move_new_state_to_right_device(self):
        super()._move_new_state_to_right_device()
        on_gpu = self.gpu_optimizer
        if on_gpu is not None and isinstance(on_gpu, self.defaults['cpu_optimizer_cls']):
            # upstream tells the parts by class, and takes this one for a host memory part
            for state in on_gpu.state.values():
                state.update({key: _to_gpu(value) for key, value in state.items()})
        for optimizer in self.sub_optimizers:
            for inner_param, state in optimizer.state.items():
                if 'master_param' in state:
                    state['master_param'] = inner_param


def _to_gpu(value):
    return value.to('cuda') if isinstance(value, torch.Tensor) else value
