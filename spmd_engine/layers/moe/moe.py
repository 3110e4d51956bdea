"""A mixture of experts: of many perceptrons each token goes through a few, which a router chooses."""

from __future__ import annotations

from dataclasses import replace

from spmd_engine.arrays import einsum
from spmd_engine.arrays.backend import Array
from spmd_engine.layers.deferred import then, wait_for
from spmd_engine.layers.layer import Layer
from spmd_engine.layers.moe.dispatch import Dispatch
from spmd_engine.layers.moe.experts import GatedPerceptron, Perceptron, SharedExperts
from spmd_engine.layers.moe.router import Router
from spmd_engine.layers.moe.router_options import RouterOptions


class MoE(Layer):
    """y[b s d] = Σ_j weight_j · expert_j(x[b s d]) over the k experts that a token chose + Σ_i shared_i(x)

    E experts, of which a rank has those of its part of e, each with f cut inside as in an MLP. Tokens travel to their
    experts by all_to_all along the axes of e and back, so an expert sees the tokens of all ranks along them and its
    gradient is summed over the other axes alone. What comes back is unreduced over f and is combined at the source,
    then reduced together with what the shared experts, which every token goes through, make of it meanwhile.

    In the backward the weights of the combination get a gradient that is unreduced over f. All that follows is linear
    in it, and so it stays: one reduction of dx serves experts and router, and the router's gradient is summed over f
    as well. Auxiliary losses, which are whole on every rank along f, count on the first of these.

    Experts are ``Perceptron``s with that ``activation`` or, ``gated``, ``GatedPerceptron``s. With a ``shared_gate``,
    what the shared ones make is weighted by a sigmoid: see ``SharedExperts``.
    """

    may_cut, across = "bsfe", "f"

    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int,
        router: RouterOptions | None = None,
        *,
        shared: int = 0,
        shared_gate: bool = False,
        activation: str = "gelu",
        gated: bool = False,
        std: float = 0.02,
        out_std: float = 0.02,
    ) -> None:
        self.router = Router(width, experts, router or RouterOptions(), std)
        self.sizes = {"d": width, "f": hidden, "e": experts, "E": experts}
        self.perceptron = GatedPerceptron(std, out_std) if gated else Perceptron(activation, std, out_std)
        self.shared = SharedExperts(self.perceptron, shared, shared_gate, std)
        self.parameters = {**self.router.parameters, **self.shared.parameters}
        for number in range(experts):
            for own, each in self.perceptron.parameters.items():
                self.parameters[f"expert{number}/{own}"] = replace(each, element=("e", number))
        self.buffers, self.side_outputs = self.router.buffers, self.router.side_outputs

    def cost(self, length):
        active = (self.router.options.top_k + self.shared.many) * len(self.perceptron.parameters)
        return float(self.sizes["d"] * (active * self.sizes["f"] + self.sizes["E"]))

    def forward(self, sh, p, x, ctx):
        x = sh.all_gather(x, "b s d", "s", across="f")
        shape, x = x.shape, x.reshape(-1, x.shape[2])
        keep = ctx.training and ctx.saving
        routed = self.router.forward(sh, p, x, shape[0], ctx)
        dispatch = Dispatch(sh, routed.experts, self.sizes["e"])
        rows = dispatch.start(x[dispatch.tokens])
        y, of_shared = self.shared.forward(p, x, self._hidden(sh), keep)  # while tokens travel
        rows, of_experts = self.perceptron.forward(
            [(p[f"expert{number}"], own) for number, own in zip(dispatch.here, dispatch.rows, strict=True)],
            wait_for(rows),
            self._hidden(sh),
            keep,
        )
        rows = wait_for(dispatch.start_back(rows))
        y = _sum(dispatch.gathered(rows, shape[2], routed.choices.weights), y)
        y = sh.reduce_scatter(y.reshape(shape), "b s d", over="f", onto="s")
        saved = shape, x, routed, dispatch, rows, of_shared, of_experts
        return y, saved, *([self.router.told(routed, ctx)] if ctx.training and ctx.decided is None else [])

    def backward_input(self, sh, p, saved, dy, *side):
        shape, x, routed, dispatch, rows, of_shared, of_experts = saved
        dy = sh.all_gather(dy, "b s d", "s", across="f").reshape(-1, shape[2])
        drows, dweights = dispatch.gradients(dy, rows, routed.choices.weights)
        drows = dispatch.start(drows)
        dx, rest_of_shared = self.shared.backward_input(p, of_shared, dy)  # while gradients travel
        dlogits = self.router.backward(sh, routed, dweights, *side or [{}])
        dx = _sum(einsum("tE,dE->td", dlogits, p["router"]), dx)
        experts = [(p[f"expert{number}"], own) for number, own in zip(dispatch.here, dispatch.rows, strict=True)]
        drows, rest = self.perceptron.backward_input(experts, of_experts, wait_for(drows))

        def combined(drows):
            whole = _sum(dispatch.gathered(drows, shape[2]), dx)
            return sh.reduce_scatter(whole.reshape(shape), "b s d", over="f", onto="s")

        # The rows' gradients travel while those of the experts' weights are made.
        return then(dispatch.start_back(drows), combined), (x, dlogits, dispatch, rest, rest_of_shared)

    def backward_weight(self, sh, rest, g):
        x, dlogits, dispatch, rest, rest_of_shared = rest
        g.einsum("router", "td,tE->dE", x, dlogits)
        here = zip(dispatch.here, dispatch.rows, strict=True)
        self.perceptron.backward_weight(rest, [(g[f"expert{number}"], own) for number, own in here])
        self.shared.backward_weight(rest_of_shared, g)

    def _hidden(self, sh):
        """How much of f is here."""
        here = sh.span("f", self.sizes["f"])
        return here.stop - here.start


def _sum(own: Array, other: Array | None) -> Array:
    """``own``, with the other added to it if there is one."""
    if other is not None:
        own += other
    return own
