"""Plans on fake vLLMs: every decision, no writes."""

from __future__ import annotations

from deepinfer_cli.overlay.plan import Action, plan_install


def test_a_first_plan_adds_the_payload_then_the_hooks(fake_vllm, fake_payload, fake_manifest):
    fake = fake_vllm()
    before = fake.snapshot()
    plan = plan_install(fake.target(), fake_payload(), fake_manifest)
    assert fake.snapshot() == before
    assert (plan.match, plan.release, plan.skip, plan.adopts) == ("supported", "0.33.0", (), False)
    owners = [change.owner for change in plan.changes]
    assert owners == sorted(owners, reverse=True), "payload first, hooks last"
    hooks = [change for change in plan.changes if change.owner == "hook"]
    assert [change.path for change in hooks] == ["vllm/models/deepseek_v41/common/ops/cache_utils.py"]
    assert hooks[0].action is Action.REPLACE
