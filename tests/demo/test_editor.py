"""The graph that the editor opens holds the same workflow as the API format it was made from."""

from __future__ import annotations

from quant_loader.demo.editor import to_graph

OBJECT_INFO = {
    "Load": {"input": {"required": {"name": [["a", "b"], {}]}}, "output": ["MODEL"], "output_name": ["model"]},
    "Sample": {
        "input": {
            "required": {
                "model": ["MODEL", {}],
                "seed": ["INT", {"default": 0, "control_after_generate": True}],
                "mode": ["COMBO", {"options": ["x", "y"], "default": "y"}],
            },
            "optional": {"mask": ["MASK"]},
        },
        "output": ["LATENT"],
        "output_name": ["LATENT"],
    },
}
WORKFLOW = {
    "one": {"class_type": "Load", "inputs": {"name": "b"}},
    "two": {"class_type": "Sample", "inputs": {"model": ["one", 0], "seed": 5}},
}


def test_links_connect_the_same_sockets():
    graph = to_graph(WORKFLOW, OBJECT_INFO)
    assert graph["links"] == [[1, 1, 0, 2, 0, "MODEL"]]
    assert graph["nodes"][0]["outputs"] == [{"name": "model", "type": "MODEL", "links": [1]}]
    assert graph["nodes"][1]["inputs"] == [
        {"name": "model", "type": "MODEL", "link": 1},
        {"name": "mask", "type": "MASK", "link": None},
    ]


def test_widgets_hold_values_and_defaults_in_order():
    nodes = to_graph(WORKFLOW, OBJECT_INFO)["nodes"]
    assert nodes[0]["widgets_values"] == ["b"]
    assert nodes[1]["widgets_values"] == [5, "fixed", "y"]


def test_nodes_stand_from_left_to_right_in_the_order_they_run():
    nodes = to_graph(WORKFLOW, OBJECT_INFO)["nodes"]
    assert nodes[0]["pos"][0] < nodes[1]["pos"][0]
    assert [node["order"] for node in nodes] == [0, 1]
