"""Optimizers as users write them, each in a style of its own."""

import math

import torch


class OldAdam(torch.optim.Optimizer):
    """Adam as in old copies of PyTorch: Python's numbers, ``math.sqrt``, ``.data``."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "wd": weight_decay})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad.data
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p.data)
                    state["exp_avg_sq"] = torch.zeros_like(p.data)
                exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
                beta1, beta2 = group["betas"]
                state["step"] += 1
                if group["wd"] != 0:
                    grad = grad.add(p.data, alpha=group["wd"])
                exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
                exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                denom = exp_avg_sq.sqrt().add_(group["eps"])
                correction1 = 1 - beta1 ** state["step"]
                correction2 = 1 - beta2 ** state["step"]
                step_size = group["lr"] * math.sqrt(correction2) / correction1
                p.data.addcdiv_(exp_avg, denom, value=-step_size)


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1 - group["lr"] * group["weight_decay"])
                state = self.state[p]
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(p)
                m, (b1, b2) = state["exp_avg"], group["betas"]
                p.add_((m * b1 + p.grad * (1 - b1)).sign(), alpha=-group["lr"])
                m.mul_(b2).add_(p.grad, alpha=1 - b2)


class Rebinding(torch.optim.Optimizer):
    """States that are new tensors in every step; the average begins with the first gradient."""

    def __init__(self, params, lr=0.1, decay=0.9):
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "average" in state:
                    d = group["decay"]
                    state["average"] = d * state["average"] + (1 - d) * p.grad
                else:
                    state["average"] = p.grad.clone()
                p.sub_(group["lr"] * state["average"])


class Lookahead(torch.optim.Optimizer):
    """SGD whose weights return to a slow average every few steps."""

    def __init__(self, params, lr=0.1, k=3, alpha=0.5):
        super().__init__(params, {"lr": lr, "k": k, "alpha": alpha, "steps": 0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["slow"] = p.clone()
                p.add_(p.grad, alpha=-group["lr"])
                if group["steps"] % group["k"] == 0:
                    state["slow"].add_(p - state["slow"], alpha=group["alpha"])
                    p.copy_(state["slow"])


class NormedLamb(torch.optim.Optimizer):
    """Divides by a norm of all gradients together, then by norms of each layer."""

    def __init__(self, params, lr=0.05, betas=(0.9, 0.999), eps=1e-6, max_norm=0.5):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})
        self.max_norm = max_norm

    @torch.no_grad()
    def step(self):
        total = torch.zeros(())
        for group in self.param_groups:
            for p in group["params"]:
                total.add_(p.grad.pow(2).sum())
        clip = torch.clamp(self.max_norm / (total.sqrt() + 1e-6), max=1.0)
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                grad = p.grad * clip
                state = self.state[p]
                m = state.setdefault("m", torch.zeros_like(p))
                v = state.setdefault("v", torch.zeros_like(p))
                m.lerp_(grad, 1 - beta1)
                v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                update = m / (v.sqrt() + group["eps"])
                w, u = p.norm(), update.norm()
                trust = torch.where((w > 0) & (u > 0), w / u, torch.ones_like(w))
                p.add_(update * trust, alpha=-group["lr"])


class Counted(torch.optim.Optimizer):
    """A number of the object, warm-up by ``min``, and a condition on the number of steps."""

    def __init__(self, params, lr=0.1, warmup=4):
        super().__init__(params, {"lr": lr})
        self.warmup = warmup
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            rate = group["lr"] * min(1.0, self.count / self.warmup)
            if self.count > 5:
                rate = rate / 2
            for p in group["params"]:
                p.sub_(p.grad * rate)


class Foreach(torch.optim.Optimizer):
    def __init__(self, params, lr=0.05, momentum=0.8):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            grads = [p.grad for p in weights]
            buffers = []
            for p in weights:
                if "buffer" not in self.state[p]:
                    self.state[p]["buffer"] = torch.zeros_like(p)
                buffers.append(self.state[p]["buffer"])
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, grads)
            scaled = torch._foreach_mul(buffers, group["lr"])
            torch._foreach_addcdiv_(
                weights, scaled, torch._foreach_add(torch._foreach_abs(grads), 1.0), -1.0
            )


class Shampoo(torch.optim.Optimizer):
    """States of other shapes than the weight, and decompositions of matrices."""

    def __init__(self, params, lr=0.05, eps=1e-2):
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                grad, state = p.grad, self.state[p]
                if p.dim() != 2:
                    p.add_(grad, alpha=-group["lr"])
                    continue
                if len(state) == 0:
                    state["left"] = group["eps"] * torch.eye(p.shape[0])
                    state["right"] = group["eps"] * torch.eye(p.shape[1])
                state["left"].add_(grad @ grad.t())
                state["right"].add_(grad.t() @ grad)
                left = torch.linalg.inv(torch.linalg.cholesky(state["left"]))
                right = torch.linalg.inv(torch.linalg.cholesky(state["right"]))
                p.add_(left @ grad @ right, alpha=-group["lr"])


class MyAdam(torch.optim.Adam):
    """A class of PyTorch's with another step."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.clamp_(-0.3, 0.3)


USER_OPTIMIZERS = {
    "OldAdam": lambda p: OldAdam(p, lr=0.01),
    "OldAdam with decay": lambda p: OldAdam(p, lr=0.01, weight_decay=0.1),
    "Lion": Lion,
    "Rebinding": Rebinding,
    "Lookahead": Lookahead,
    "NormedLamb": NormedLamb,
    "Counted": Counted,
    "Foreach": Foreach,
    "Shampoo": Shampoo,
    "MyAdam": lambda p: MyAdam(p, lr=0.01),
}
