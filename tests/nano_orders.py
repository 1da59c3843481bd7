"""Orders of nano-batches, drawn at random, and what must hold of each."""

import hypothesis.strategies as st

from harness.api import NanoOrder
from harness.api.nano import PRODUCTS


@st.composite
def nano_orders(draw, products=PRODUCTS):
    """Two to four nano-batches. Some parts are a layer behind others in about half of the orders."""
    count = draw(st.integers(2, 4))
    divisors = [n for n in range(1, count + 1) if not count % n]
    parts = {"KQV": count} | {name: draw(st.sampled_from(divisors)) for name in PRODUCTS[1:]}
    parts |= {name: 1 for name in PRODUCTS if name not in products}
    rng = draw(st.randoms(use_true_random=False))

    def batches(product):
        each = count // parts[product[0]]
        return range(product[1] * each, (product[1] + 1) * each)

    def before(product):
        """What stands before a product within one layer."""
        name, part = product
        if name == "KQV":
            return {("KQV", part - 1)} if part else set()
        earlier = PRODUCTS[PRODUCTS.index(name) - 1]
        return {(earlier, k * parts[earlier] // count) for k in batches(product)}

    left, layer = {(name, part) for name in PRODUCTS for part in range(parts[name])}, []
    while left:
        layer.append(rng.choice(sorted(p for p in left if not before(p) & left)))
        left.discard(layer[-1])
    last = max(i for i, (name, _) in enumerate(layer) if name == "KQV")
    first = draw(st.sampled_from([len(layer), rng.randint(last + 1, len(layer))]))
    layer, behind = layer[:first], layer[first:]  # the latter run in the next turn, before what waits for them there
    order = []
    while layer or behind:
        free = bool(layer) and not any(set(batches(p)) & set(batches(layer[0])) for p in behind)
        turn = layer if not behind or (free and layer and rng.random() < 0.5) else behind
        order.append(turn.pop(0))
    cut = draw(st.sampled_from([0.5, 0.4, 0.65])) if count % 2 == 0 else 0.5
    return NanoOrder(tuple(order), cut, draw(st.sampled_from([1.0, 0.5])))


def check_order(products, order):
    """Asserts that (product, layer) in `products` is each part of some layers once, and that each nano-batch runs its
    own one after the other, layer by layer; KQV of a layer in the order of nano-batches."""
    layers = 1 + max(layer for _, layer in products)
    for batch in range(order.nano_batches):
        mine = [(layer, PRODUCTS.index(p[0])) for p, layer in products if batch in order.batches(p)]
        assert mine == [(layer, place) for layer in range(layers) for place in range(len(PRODUCTS))]
    attending = [(layer, part) for (name, part), layer in products if name == "KQV"]
    assert attending == sorted(attending)
    assert len(products) == layers * sum(order.parts.values())
