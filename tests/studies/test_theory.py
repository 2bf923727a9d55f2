"""`perfedrl theory`: output and files of the command, and errors for bad input."""

import json

import pytest
from fixtures import write

import perfedrl as pf
from perfedrl.report.plots import BoundPair, Pairs, rows
from perfedrl.studies.theory import analysis
from perfedrl.studies.theory import tables as theory_tables
from perfedrl.studies.theory.figures import pairs
from perfedrl.theory.realized_bounds import RealizedBound

SMALL = {
    "name": "small",
    "seeds": 2,
    "rounds": 3,
    "fleet": {"env": "bandits"},
    "policy": {"name": "table"},
    "algorithm": {"name": "per-fedavg-pg", "alpha": 0.0625, "beta": 0.007, "local_steps": 2},
}
NETWORK = {
    **SMALL,
    "fleet": {"env": "arc"},
    "policy": {"name": "mlp", "hidden": [4]},
    "algorithm": {"name": "per-fedavg-pg", "alpha": 0.1, "beta": 0.1},
}


def with_algorithm(**settings) -> dict:
    return {**SMALL, "algorithm": {**SMALL["algorithm"], **settings}}


@pytest.fixture
def config(tmp_path):
    return write(tmp_path / "small.toml", SMALL)


@pytest.mark.slow
def test_a_plan_and_measurements_on_the_terminal_and_as_json(run, config, tmp_path):
    code, out, err = run("theory", config, "--epsilon", "0.1", "--json", "said.json")
    assert (code, err.splitlines()[0]) == (0, "measuring: running ...")
    for words in ("constants (worst case)", "Theorem 1", "alpha-dagger", "Corollary 1, sharp", "cheapest", "realized"):
        assert words in out
    said = json.loads((tmp_path / "said.json").read_text())
    assert said["constants"]["L_J"] == 8
    assert said["problem"]["agents"] == 2
    assert set(said["plans"]) == {"cheapest", "Corollary 1, crude", "Corollary 1, sharp"}
    for plan in said["plans"].values():
        assert all(condition["holds"] for condition in plan["conditions"])
        assert plan["theorem_1"]["total"] <= 0.1
        assert plan["binding"]
    assert said["theorem_1"]["total"] > 0, "the config's beta is below the ceiling"
    assert said["smaller_alpha"]["none"]["trajectories"] < said["plans"]["cheapest"]["trajectories"]
    assert all(row["realized"] <= row["bound"] for row in said["realized"])
    assert said["fixed_points"] == []
    assert said["regime"]["name"] == "moderate (R2)"
    assert said["squared_meta_gradient_at_the_start"] == pytest.approx(0.01904, abs=1e-5)
    assert "|grad F|^2 is 0.01904 at the start" in out


def test_without_an_accuracy_there_is_no_plan(run, config):
    code, out, _ = run("theory", config, "--no-measure")
    assert code == 0
    assert "for a plan, say how accurate" in out
    assert "cheapest" not in out
    assert "realized" not in out


def test_fixed_parts_of_a_plan_are_kept(run, config, tmp_path):
    code, _, _ = run(
        "theory", config, "--epsilon", "0.1", "--tau", "3", "--m-h", "7", "--no-measure", "--json", "x.json"
    )
    assert code == 0
    plan = json.loads((tmp_path / "x.json").read_text())["plans"]["cheapest"]
    assert (plan["tau"], plan["m_h"]) == (3, 7)


def test_the_reason_is_given_where_theorem_1_does_not_apply(run, tmp_path):
    code, out, _ = run("theory", write(tmp_path / "x.toml", with_algorithm(beta=0.7)), "--no-measure")
    assert code == 0
    assert "Theorem 1 says nothing of this run: condition (i) fails: beta = 0.7 is 96.6 times" in out


def test_networks_need_a_radius(run, tmp_path):
    path = write(tmp_path / "net.toml", NETWORK)
    code, out, err = run("theory", path)
    assert (code, out) == (2, "")
    assert "hold on bounded sets only: give a radius" in err
    code, out, err = run("theory", path, "--radius", "0.1")
    assert (code, out) == (2, "")
    assert "too small: parameters start at a distance of" in err
    code, out, _ = run("theory", path, "--radius", "9", "--epsilon", "1")
    assert code == 0
    assert "finitely many states only" in out
    assert "stay within a distance of 9 from 0" in out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--epsilon", "0"), "epsilon, the accuracy to plan for, must be a finite number > 0"),
        (("--epsilon", "-1"), "must be a finite number > 0; it is -1"),
        (("--tau", "2"), "give --epsilon too"),
        (("--epsilon", "0.1", "--rounds", "0"), "K must be a whole number of at least 1"),
        (("--epsilon", "0.1", "--rounds", "10"), "K = 10 rounds are too few: condition (i) ceiling"),
        (("--epsilon", "0.1", "--beta", "1"), "condition (i) ceiling fails: beta = 1 is 138 times"),
        (("--epsilon", "0.1", "--m-in", "1", "--bias", "crude"), "condition (iii) bias fails: m_in = 1"),
        (("--epsilon", "0.1", "--gap", "-1"), "the gap"),
        (("--reward-bound", "0.5"), "rewards reach 1: 0.5 is no bound on them"),
        (("--radius", "2"), "hold everywhere: there is no radius to give"),
        (("--epsilon", "1e-320"), "too large or too small to compute with"),
        (("--epsilon", "0.1", "--gap", "1e308"), "too large or too small to compute with"),
        (("--bias", "wrong"), "wrong"),
        (("--json", "nowhere/x.json/y"), "nowhere"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(run, config, args, says, tmp_path):
    if "--json" in args:
        (tmp_path / "nowhere").write_text("a file")
    code, out, err = run("theory", config, *args)
    assert (code, out) == (2, "")
    assert says in err.replace("\n", " ")
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({**SMALL, "algorithm": {"name": "local-pg", "beta": 0.1}}, "not LocalPG"),
        (with_algorithm(variant="first-order", alpha=0.5), "condition (iii) fails for every m_in"),
    ],
)
def test_configs_without_a_plan_are_refused(run, tmp_path, table, says):
    code, out, err = run("theory", write(tmp_path / "x.toml", table), "--epsilon", "0.1")
    assert (code, out) == (2, "")
    assert says in err.replace("\n", " ")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"fleet": {"env": "bandits", "rewards": [[0.0, 0.0]]}}, "R_max must be a finite number > 0"),
        (
            {"fleet": {"env": "point-navigation"}, "policy": {"name": "gaussian-mlp"}},
            "GaussianMLP has no finite constants",
        ),
    ],
)
def test_fleets_without_constants_are_refused(run, tmp_path, change, says):
    code, out, err = run("theory", write(tmp_path / "x.toml", SMALL | change), "--epsilon", "0.1")
    assert (code, out) == (2, "")
    assert says in err.replace("\n", " ")


def test_very_small_accuracies_are_planned_for(run, config):
    code, out, _ = run("theory", config, "--epsilon", "1e-60", "--no-measure")
    assert code == 0
    assert "e+" in out


def test_a_smaller_alpha_is_compared_at_the_same_given_quantities(run, config, tmp_path):
    args = ("--epsilon", "0.1", "--tau", "4", "--m-h", "5", "--m-out", "6", "--no-measure", "--json", "x.json")
    assert run("theory", config, *args)[0] == 0
    said = json.loads((tmp_path / "x.json").read_text())
    for name, plan in said["smaller_alpha"].items():
        assert (plan["tau"], plan["m_out"]) == (4, 6)
        assert plan["m_h"] == (0 if name == "none" else 5)


def test_the_gap_depends_on_alpha():
    found = analysis.of_config(pf.make_config(with_algorithm(alpha=5.0)), 0.1)
    gaps = {name: plan.problem.gap for name, plan in found.smaller.items()}
    assert found.problem.gap < gaps["half"] < gaps["none"]
    assert gaps["none"] == pytest.approx(2 / 3)
    assert all(
        plan.problem.gap == 0.3 for plan in analysis.of_config(pf.make_config(SMALL), 0.1, gap=0.3).smaller.values()
    )


def test_a_missing_config_is_named(run):
    code, _, err = run("theory", "no.toml")
    assert code == 2
    assert "there is no config no.toml" in err


def test_the_witness_takes_no_settings(run):
    code, _, err = run("theory", "witness", "--epsilon", "0.1")
    assert code == 2
    assert "the witness is fixed" in err


def test_the_witness_is_printed_to_all_digits(run, tmp_path):
    code, out, _ = run("theory", "witness", "--json", "w.json")
    assert code == 0
    for number in ("-0.5555031", "-0.3195682", "-0.2568571", "0.4999539", "0.0604632", "0.1571893"):
        assert number in out
    assert "no" not in [cell.strip() for cell in out.replace("│", "\n").splitlines()]
    said = json.loads((tmp_path / "w.json").read_text())
    assert all(a["agrees"] for a in said["agreements"])
    assert [p["alpha"] for p in said["witness"]] == [1, 0.5, 0.25, 0.1, 0.05, 0.01, 0.001, 0.0001]
    assert not any(p["attracting"] for p in said["witness"])
    assert all(p["attracting"] for p in said["rewards 1 - r"])


@pytest.mark.slow
def test_fixed_points_are_shown_agent_by_agent(run, tmp_path):
    table = {**SMALL, "policy": {"name": "log-linear", "features": [[[0.0], [1.0], [3.0]]]}}
    table["algorithm"] = {"name": "per-fedavg-pg", "variant": "first-order", "alpha": 0.5, "beta": 0.05}
    code, out, _ = run("theory", write(tmp_path / "w.toml", table))
    assert code == 0
    assert "not attracting" in out
    assert "0.06046" in out
    assert "0.1572" in out


def test_fedavg_has_the_theory_of_alpha_zero(run, tmp_path):
    table = {**SMALL, "algorithm": {"name": "fedavg-pg", "alpha": 2.0, "beta": 0.01}}
    code, out, _ = run("theory", write(tmp_path / "f.toml", table), "--epsilon", "0.1")
    assert code == 0
    assert "regime of alpha = 0: none" in out
    assert "cheapest plans at smaller alpha" not in out
    assert "are searched where alpha > 0" in out


def test_findings_without_the_command_line():
    found = analysis.of_config(pf.make_config(SMALL), 0.1)
    assert found.bound.total > 0
    assert found.silent == ""
    assert list(found.smaller)[-1] == "none"
    content = theory_tables.as_content(found, None)
    assert "realized" not in content


def test_pairs_leave_out_what_is_zero_and_list_the_rest():
    plot = pairs(
        "name", "title", [RealizedBound("a", "A", "Lemma 1", 2.0, 1.0), RealizedBound("b", "B", "Lemma 2", 2.0, 0.0)]
    )
    assert plot == Pairs("name", "title", "value (each in its own unit)", (BoundPair("a  [Lemma 1]", 2.0, 1.0),))
    assert rows(plot) == (("quantity", "bound", "realized"), [("a  [Lemma 1]", 2.0, 1.0)])
