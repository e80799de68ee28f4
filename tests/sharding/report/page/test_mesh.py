"""The mesh on a plan's page, in a real browser: devices, groups, colours of axes."""

import itertools

import pytest

from autoshard.sharding.report.summary import mesh_sizes
from tests.sharding.report.page.elements import boxes, colours, texts, texts_of
from tests.sharding.report.page.plans import PLANS, requested

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("name", ["searched", "requested"])
def test_each_mesh_axis_is_drawn_on_the_machine(shown, name):
    plan, page = PLANS[name](), shown(name)
    sizes = mesh_sizes(plan)
    assert texts(page, ".panel figcaption") == [f"{axis} {n}" for axis, n in sizes.items()]
    for number, (axis, size) in enumerate(sizes.items(), 1):
        panel = f".panel:nth-of-type({number})"
        rects = boxes(page, f"{panel} rect[data-d]", "+e.dataset.d", "e.dataset.g", "e.classList.contains('on')")
        assert len(rects) == plan.mesh.size and all(w > 10 and h > 10 for _, _, w, h, *_ in rects)
        assert len({(x, y) for x, y, *_ in rects}) == plan.mesh.size  # no two overlap
        group = {d: g for *_, d, g, _ in rects}
        assert [d for *_, d, _, on in rects if on] == [d for d in group if group[d] == group[0]]
        assert set(map(list(group.values()).count, group.values())) == {size}
        coordinates = dict(zip(plan.device_order, itertools.product(*map(range, sizes.values())), strict=True))
        k = list(sizes).index(axis)
        for a, b in itertools.combinations(group, 2):  # in one group: equal coordinates on every other axis
            same = coordinates[a][:k] + coordinates[a][k + 1 :] == coordinates[b][:k] + coordinates[b][k + 1 :]
            assert (group[a] == group[b]) == same
        numbers = texts_of(page, f"{panel} .plane text")
        assert [int(n) for n in numbers] == [coordinates[d][k] for *_, d, _, _ in rects]


def test_devices_are_drawn_as_in_the_topology(shown):
    plan, page = requested(), shown("requested")  # z, y, x of 2 each
    assert [size for _, size in plan.topology] == [2, 2, 2]
    positions = {d: (x, y) for x, y, _, _, d in boxes(page, ".panel:first-of-type rect[data-d]", "+e.dataset.d")}
    assert positions[1][0] > positions[0][0] and positions[1][1] == positions[0][1]  # x runs to the right
    assert positions[2][1] > positions[0][1] and positions[2][0] == positions[0][0]  # y runs down
    assert positions[4][0] > positions[1][0] + 20  # the next plane of z is to the right
    assert texts(page, ".panel:first-of-type .plane > span") == ["z 0", "z 1"]
    assert len(boxes(page, ".panel:first-of-type .plane path")) == 2 * (2 + 2)  # links along x and y of both planes


def test_hovering_over_a_device_shows_its_groups(show):
    plan, page = requested(), show(requested())
    page.point('.panel:nth-of-type(2) rect[data-d="6"]')
    order, sizes = plan.device_order, list(mesh_sizes(plan).values())
    coordinates = list(itertools.product(*map(range, sizes)))
    device_coordinates = coordinates[order.index(6)]
    for k, axis in enumerate(plan.mesh.axis_names):
        group = {
            order[i]
            for i, p in enumerate(coordinates)
            if p[:k] + p[k + 1 :] == device_coordinates[:k] + device_coordinates[k + 1 :]
        }
        rects = boxes(page, f".panel:nth-of-type({k + 1}) rect.on", "+e.dataset.d")
        assert {d for *_, d in rects} == group, axis
    place = ", ".join(f"{a} {n}" for a, n in zip(plan.mesh.axis_names, device_coordinates, strict=True))
    coordinates_text = "Device 6: coordinates z 1, y 1, x 0"
    assert texts(page, "#device")[0].startswith(f"{coordinates_text}; mesh position {place}. Groups of devices along ")


@pytest.mark.parametrize("name", ["searched", "requested"])
def test_a_legend_says_what_the_boxes_and_their_numbers_are(shown, name):
    plan, page = PLANS[name](), shown(name)
    last = plan.mesh.size - 1
    coordinates = dict(zip(plan.device_order, itertools.product(*map(range, mesh_sizes(plan).values())), strict=True))
    numbers = [texts_of(page, f".panel:nth-of-type({k + 1}) .plane text")[-1] for k in range(len(mesh_sizes(plan)))]
    place = ", ".join(f"{a} {n}" for a, n in zip(plan.mesh.axis_names, coordinates[last], strict=True))
    assert numbers == list(map(str, coordinates[last]))
    at = ", ".join(f"{name} {size - 1}" for name, size in plan.topology)
    text = texts(page, "#mesh")[0]
    assert f"The last box is device {last}: coordinates {at}; mesh position {place}." in text
    assert "The number in a box is the device's position along the mesh axis." in text
    assert f"{plan.topology[-1][0]} runs from left to right, {plan.topology[-2][0]} from top to bottom" in text
    swatches = page.run("[...document.querySelectorAll('#mesh .legend .key')].map((e) => "
                        "getComputedStyle(e).backgroundColor)")  # fmt: skip
    drawn = page.run("['rect.on', 'rect:not(.on)[data-d]'].map((s) => document.querySelector('.plane ' + s))"
                     ".filter(Boolean).map((e) => getComputedStyle(e).fill)")  # fmt: skip
    assert len(swatches) == 2 and set(drawn) <= set(swatches)


@pytest.mark.parametrize("name", PLANS)
def test_each_axis_has_its_own_colour(shown, name):
    page = shown(name)
    legend = colours(page, "#axes-list button")
    assert all(len(shades) == 1 for shades in legend.values())
    if name != "large":  # hundreds of axes cannot all have distinct colours
        assert len({min(shades) for shades in legend.values()}) == len(legend)
    named = [legend[axis] for axis in ("batch", "seq", "heads", "ffn", "vocab", "embed")]
    assert len({min(shades) for shades in named}) == 6
    for row in ("Parameters", "Activations", "Optimizer state"):
        number = next(i for i, t in enumerate(texts(page, "#tensors-list > details > summary")) if t.startswith(row))
        shades = colours(page, f"#tensors-list > details:nth-of-type({number + 1}) .axis")
        assert len(shades) >= 4 and all(legend[axis] == used for axis, used in shades.items())


def test_axes_that_are_shown_as_one_have_one_button(shown):
    buttons = texts(shown("requested"), "#axes-list button b")
    assert buttons.count("head_dim") == 1 and len(set(buttons)) == len(buttons)


def test_sharded_dimensions_are_filled_and_name_their_mesh_axis(shown):
    page = shown("requested")
    rows = page.run(
        "[...document.querySelectorAll('#tensors-list > details:first-of-type tbody tr')].map((e) => "
        "[e.querySelector('code').textContent, [...e.querySelectorAll('.dim')].map((d) => "
        "[d.querySelector('.axis').className.split(' ').slice(0, 2).join(' '), d.textContent])])"
    )
    up = dict(rows)["mlp/up"]
    assert up[0] == ["axis part", "embed 32fsdp 2"] and up[1] == ["axis on", "ffn 128tp 4"]
    labels = texts(page, "#tensors-list .axis.on")
    assert "batch 16" in labels and "seq 16" in labels
