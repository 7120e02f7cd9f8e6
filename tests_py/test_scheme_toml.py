# SPDX-License-Identifier: Apache-2.0
"""Schemes as people write them: TOML both ways, and what each word means."""

import random
import re
import sys

import breccia
import pytest
from breccia import recipe_names
from breccia.recipes import all_recipes
from breccia.schemes import UNSAID, Activations, KVCache, Match, ModelScheme, Rule, StoredScale
from breccia.schemes.matching import KINDS

if sys.version_info < (3, 11):
    pytest.importorskip("tomli")

TEXT = """
kv_cache = "fp8"

[[rule]]
match = ["lm_head", "re:model\\\\.layers\\\\.[01]\\\\..*"]
weights = "none"

[[rule]]
match = "*.self_attn.*"
weights = "fp8-row"
inputs = "dynamic"

[[rule]]
match = "*.experts.*"
weights = "nvfp4:mse"
inputs = "local"

[[rule]]
match = "class:Linear"
weights = { name = "int4", group_size = 64 }
inputs = { element = "float8_e4m3fn", per = "token", when = "dynamic" }

[[rule]]
match = "*"
inputs = "none"
"""


def test_rules_in_their_order():
    scheme = breccia.ModelScheme.from_toml(TEXT)
    assert scheme.kv_cache == KVCache("float8_e4m3fn")
    assert scheme.rule("lm_head").weights is None
    assert scheme.rule("model.layers.1.self_attn.q_proj").weights is None
    token = Activations("float8_e4m3fn", "token", "dynamic")
    attention = scheme.rule("model.layers.2.self_attn.q_proj")
    assert (attention.weights, attention.inputs) == (breccia.Float8CurrentScaling(granularity="row"), token)
    expert = scheme.rule("model.layers.2.mlp.experts.0.w1")
    assert expert.weights == breccia.NVFP4BlockScaling(scale_search="mse")
    assert str(expert.inputs) == "NVFP4 local"
    other = scheme.rule("model.layers.2.mlp.up_proj")
    assert (other.weights, other.inputs) == (breccia.INT4Scaling(group_size=64), token)
    last = scheme.rule("model.embed", ("Embedding",))
    assert (last.weights, last.inputs) == (UNSAID, None)
    assert ModelScheme.from_toml(scheme.to_toml()) == scheme
    assert ModelScheme.from_dict(scheme.to_dict()) == scheme


def _some(chance):
    """A scheme of anything, however odd."""
    words = ["q_proj", "a.b", "*.x", "[", 'quote"\\', "é", "re:a", "name:b", "nvfp4", "\x7f", "a\tb", "kept"]
    plain = ["a", r"a\.b", "(x|y)"]

    def activations():
        per = chance.choice(["tensor", "token", "group", "block", "channel", "head", "token-head"])
        size = chance.choice([16, 32, 128]) if per == "group" else None
        element = chance.choice(["float8_e4m3fn", "int8", "float4_e2m1fn"])
        scale = chance.choice(["float32", "float8_e8m0fnu", "float8_e4m3fn"])
        when = chance.choice(["static", "dynamic", "local"])
        bound = chance.choice([None, 1200.0, 1e-7])
        return Activations(element, per, when, size, chance.random() < 0.5, scale, bound)

    def rule():
        kinds = [chance.choice(KINDS) for _ in range(chance.randrange(1, 4))]
        patterns = ["" if k == "all" else chance.choice(plain if k.startswith("regex") else words) for k in kinds]
        recipe = chance.choice(all_recipes())()
        named = recipe_names.recipe_of(chance.choice(recipe_names.names()))
        weights = chance.choice([None, UNSAID, "Q4_K", "nvfp4", "kept", "a:b", recipe, named])
        inputs, outputs = (chance.choice([None, UNSAID, activations()]) for _ in range(2))
        matches = tuple(Match(kind, pattern) for kind, pattern in zip(kinds, patterns, strict=True))
        return Rule(matches, weights, inputs, outputs, chance.random() < 0.2, chance.choice([None, 16]))

    cache = KVCache("float8_e4m3fn", chance.choice(["tensor", "head"]), chance.choice(["static", "dynamic"]))
    scale = StoredScale("a.b", "k", (0.5, 1e-30, float("inf")), "divisor", "a.b.k_scale", "BF16", (3,))
    rules = tuple(rule() for _ in range(chance.randrange(4)))
    return ModelScheme(rules, chance.choice([None, UNSAID, cache]), (scale,) * chance.randrange(2))


def test_any_scheme_comes_back():
    for seed in range(300):
        scheme = _some(random.Random(seed))
        text = scheme.to_toml()
        assert ModelScheme.from_toml(text) == scheme, text
        assert ModelScheme.from_dict(scheme.to_dict()) == scheme
        assert hash(ModelScheme.from_toml(text)) == hash(scheme)


@pytest.mark.parametrize("name", recipe_names.names())
def test_recipes_are_written_by_name(name):
    text = ModelScheme((Rule((Match("all"),), recipe_names.recipe_of(name)),)).to_toml()
    weights = re.search(r'weights = "(.*)"', text)[1]
    assert recipe_names.recipe_of(weights) == recipe_names.recipe_of(name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[rule]", "a scheme must be TOML"),
        ('rules = "x"', "got 'rules'"),
        ("[rule]\nmatch = 'a'", r"tables \[\[rule\]\]"),
        ("[[rule]]\nweights = 'nvfp4'", "rule 1 must be a table with match"),
        ("[[rule]]\nmatch = 'a'\nweigths = 'nvfp4'", "rule 1 must be a table"),
        ("[[rule]]\nmatch = 'a'\n[[rule]]\nmatch = 'b'\nweights = 'nvfp4:x'", r"rule 2 \(b\): the option"),
        ("[[rule]]\nmatch = 'a'\nweights = 4", "weights must be the name of a recipe"),
        ("[[rule]]\nmatch = 'a'\nweights = 'mxfp8'\ninputs = 'static'", "MXFP8 must not be static"),
        ("[[rule]]\nmatch = 'a'\nweights = 'fp8'\ninputs = 'some'", "inputs must be one of dynamic"),
        ("[[rule]]\nmatch = 'a'\ninputs = 'dynamic'", "where weights are not quantized"),
        ("[[rule]]\nmatch = 're:('", "regular expression"),
        ("kv_cache = 'fp4'", "kv_cache must be one of fp8"),
        ("kv_cache = { elements = 'int8' }", "fields of KVCache"),
        ("[[scale]]\nmodule = 'a'", "fields of StoredScale"),
    ],
)
def test_a_mistake_is_named(text, message):
    with pytest.raises(ValueError, match=message):
        ModelScheme.from_toml(text)
