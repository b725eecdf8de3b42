"""Simulated machines: what becomes of pods when things go wrong with the nodes that they run on."""

from __future__ import annotations

import pytest

from pacekeeper_operator.api.names import METRICS_PORT
from pacekeeper_operator.decide.nodes.quarantine_steps import ProbePod
from pacekeeper_operator.observe.views import view_pod
from simulation.kubernetes.api.errors import ApiError
from simulation.kubernetes.machine import ImagePulls
from simulation.network import SIMULATED_KUBELET_PORT
from testing.simulated.simulated_machines import NAMESPACE, TRAINER, MachinesHarness


def test_a_worker_is_placed_started_and_told_of() -> None:
    machines = MachinesHarness()
    name = machines.create_worker_pod()
    worker = machines.is_running(name)
    view = view_pod(machines.get_pod(name))
    assert view.started
    assert view.node == worker.node
    assert view.address == worker.address
    assert machines.world.network.addresses[view.address] == view.node
    containers = machines.get_pod(name)["status"]["initContainerStatuses"]
    assert [container["state"].keys() for container in containers] == [{"running"}]
    assert [container["ready"] for container in containers] == [True]
    conditions = {"PodScheduled", "PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady"}
    assert {type_ for type_ in conditions if machines.get_condition(name, type_)["status"] == "True"} == conditions


def test_an_end_and_its_report_are_apart_and_the_sidecar_ends_after_the_trainer() -> None:
    machines = MachinesHarness()
    name = machines.create_worker_pod()
    worker = machines.is_running(name)
    worker.end(1, "Error", "ValueError: x")
    assert not view_pod(machines.get_pod(name)).ended
    assert 0.05 <= machines.wait_until(lambda: view_pod(machines.get_pod(name)).exit_code == 1) <= 0.65
    assert machines.get_phase(name) == "Running"
    assert [c["state"].keys() for c in machines.get_pod(name)["status"]["initContainerStatuses"]] == [{"running"}]
    machines.wait_until(lambda: machines.get_phase(name) == "Failed")
    assert worker.messages == ["start", "exit 1", "kill"]
    assert machines.get_condition(name, "Ready")["status"] == "False"
    assert view_pod(machines.get_pod(name)).exit_message == "ValueError: x"
    assert worker.address not in machines.world.network.addresses


def test_a_trainer_that_ends_well_makes_a_pod_that_has_succeeded() -> None:
    machines = MachinesHarness()
    name = machines.create_worker_pod()
    machines.is_running(name).end(0)
    machines.wait_until(lambda: machines.get_phase(name) == "Succeeded")
    assert machines.get_termination(name)["reason"] == "Completed"


def test_a_deleted_pod_is_told_to_end_and_goes_when_it_has() -> None:
    machines = MachinesHarness()
    name = machines.create_worker_pod()
    worker = machines.is_running(name)
    machines.api.delete("pods", name, NAMESPACE)
    machines.wait_until(lambda: machines.find_pod(name) is None)
    assert worker.messages == ["start", "terminate 10", "exit 143", "kill"]


def test_a_shorter_grace_shortens_an_end_under_way() -> None:
    machines = MachinesHarness()
    name = machines.create_worker_pod()
    worker = machines.is_running(name)
    worker.takes = 100.0
    machines.api.delete("pods", name, NAMESPACE)
    machines.wait(1.0)
    machines.api.delete("pods", name, NAMESPACE, grace=2)
    assert machines.wait_until(lambda: machines.find_pod(name) is None) < 5.0
    assert worker.messages[:3] == ["start", "terminate 10", "terminate 2"]


def test_a_pod_deleted_before_it_has_started_never_runs() -> None:
    machines = MachinesHarness()
    name = machines.create_worker_pod()
    machines.wait_until(lambda: machines.get_node_name(name))
    machines.api.delete("pods", name, NAMESPACE)
    machines.wait_until(lambda: machines.find_pod(name) is None, 5.0)
    machines.wait(10.0)
    assert not machines.workers


def test_with_grace_0_the_object_goes_at_once_and_the_process_later() -> None:
    machines = MachinesHarness()
    name = machines.create_worker_pod()
    worker = machines.is_running(name)
    machines.api.delete("pods", name, NAMESPACE, grace=0)
    assert machines.find_pod(name) is None
    assert worker.alive
    machines.wait_until(lambda: not worker.alive, 15.0)
    machines.wait_until(lambda: worker.address not in machines.world.network.addresses)


def test_a_name_used_again_after_a_forced_removal_is_another_pod() -> None:
    machines = MachinesHarness()
    name = machines.create_worker_pod()
    old = machines.is_running(name)
    old.takes = 100.0
    machines.api.delete("pods", name, NAMESPACE, grace=0)
    machines.create_worker_pod()
    new = machines.is_running(name)
    assert new is not old
    machines.wait_until(lambda: not old.alive, 15.0)
    machines.wait(5.0)
    assert new.alive
    assert machines.get_phase(name) == "Running"


def test_a_node_without_power_says_nothing_and_its_pods_stay_until_they_are_evicted() -> None:
    machines = MachinesHarness()
    name = machines.create_worker_pod()
    worker = machines.is_running(name)
    machines.node_pool.nodes[worker.node].power_off()
    assert not worker.alive
    number = int(worker.node[-1])
    took = machines.wait_until(lambda: "unreachable:NoExecute" in machines.list_taints(number))
    assert 35.0 <= took <= 50.0
    assert machines.get_phase(name) == "Running"
    took = machines.wait_until(lambda: "deletionTimestamp" in machines.get_pod(name)["metadata"], 400.0)
    assert 299.0 <= took <= 305.0
    assert machines.get_condition(name, "DisruptionTarget")["reason"] == "DeletionByTaintManager"
    machines.wait(600.0)
    assert "deletionTimestamp" in machines.get_pod(name)["metadata"]  # no kubelet is left to report its end


def test_after_a_reboot_what_ran_has_failed() -> None:
    machines = MachinesHarness()
    name = machines.create_worker_pod()
    worker = machines.is_running(name)
    node = machines.node_pool.nodes[worker.node]
    node.power_off()
    machines.wait(10.0)
    node.power_on()
    machines.wait_until(lambda: machines.get_phase(name) == "Failed", 20.0)
    assert (machines.get_termination(name)["exitCode"], machines.get_termination(name)["reason"]) == (
        137,
        "ContainerStatusUnknown",
    )
    assert "unreachable:NoExecute" not in machines.list_taints(int(worker.node[-1]))


def test_a_pod_that_was_terminating_when_the_power_failed_goes_after_the_reboot() -> None:
    machines = MachinesHarness()
    name = machines.create_worker_pod()
    worker = machines.is_running(name)
    worker.takes = 8.0
    machines.api.delete("pods", name, NAMESPACE)
    machines.wait(1.0)
    machines.node_pool.nodes[worker.node].power_off()
    machines.wait(60.0)
    assert machines.find_pod(name) is not None
    machines.node_pool.nodes[worker.node].power_on()
    machines.wait_until(lambda: machines.find_pod(name) is None, 20.0)


def test_a_pod_that_was_deleted_while_its_node_was_off_goes_after_the_reboot() -> None:
    machines = MachinesHarness()
    name = machines.create_worker_pod()
    worker = machines.is_running(name)
    machines.node_pool.nodes[worker.node].power_off()
    machines.api.delete("pods", name, NAMESPACE)
    machines.wait(30.0)
    machines.node_pool.nodes[worker.node].power_on()
    machines.wait_until(lambda: machines.find_pod(name) is None, 20.0)


def test_an_end_that_the_power_failure_kept_from_being_told_is_told_after_the_reboot() -> None:
    machines = MachinesHarness()
    name = machines.create_worker_pod()
    worker = machines.is_running(name)
    worker.end(3, "Error")
    machines.node_pool.nodes[worker.node].power_off()
    machines.wait(5.0)
    assert machines.get_phase(name) == "Running"
    machines.node_pool.nodes[worker.node].power_on()
    machines.wait_until(lambda: machines.get_phase(name) == "Failed", 20.0)
    assert machines.get_termination(name)["exitCode"] == 3


def test_a_kubelet_that_is_away_hears_and_tells_nothing_and_the_containers_go_on() -> None:
    machines = MachinesHarness()
    first, second = machines.create_worker_pod(0), machines.create_worker_pod(1)
    one, other = machines.is_running(first), machines.is_running(second)
    for node in machines.node_pool.nodes.values():
        node.stop_kubelet()
    one.end(1)
    machines.api.delete("pods", second, NAMESPACE)
    machines.wait(60.0)
    assert other.alive
    assert machines.get_phase(first) == "Running"
    assert set(machines.list_taints(0)) == {"unreachable:NoSchedule"}  # all nodes are silent: no pod is evicted
    for node in machines.node_pool.nodes.values():
        node.start_kubelet()
    machines.wait_until(lambda: machines.get_phase(first) == "Failed", 5.0)
    machines.wait_until(lambda: machines.find_pod(second) is None, 20.0)
    machines.wait_until(lambda: machines.list_taints(0) == [], 10.0)


def test_a_node_cut_from_the_api_server_tells_when_it_is_back() -> None:
    machines = MachinesHarness()
    first, second, third = (machines.create_worker_pod(i) for i in range(3))
    workers = [machines.is_running(name) for name in (first, second, third)]
    for node in machines.node_pool.nodes:
        machines.world.network.cut(node, "api")
    workers[0].end(1)
    machines.api.delete("pods", second, NAMESPACE)
    machines.api.delete("pods", third, NAMESPACE, grace=0)
    machines.wait(30.0)
    assert workers[1].alive
    assert workers[2].alive
    assert machines.get_phase(first) == "Running"
    machines.world.network.heal()
    machines.wait_until(lambda: machines.get_phase(first) == "Failed", 5.0)
    machines.wait_until(lambda: machines.find_pod(second) is None, 20.0)
    machines.wait_until(lambda: not workers[2].alive, 20.0)


def test_an_api_server_that_is_down_stops_all_of_them() -> None:
    machines = MachinesHarness()
    name = machines.create_worker_pod()
    worker = machines.is_running(name)
    machines.api.faults.down = True
    worker.end(1)
    other = machines.create_worker_pod(1)
    machines.wait(90.0)
    assert machines.get_phase(name) == "Running"
    assert machines.get_node_name(other) == ""
    machines.api.faults.down = False
    machines.wait_until(lambda: machines.get_phase(name) == "Failed", 5.0)
    machines.is_running(other)
    machines.wait(10.0)
    assert machines.list_taints(0) == []


def test_another_machine_of_the_same_name_knows_nothing_of_the_pods_of_the_first() -> None:
    machines = MachinesHarness()
    name = machines.create_worker_pod()
    worker = machines.is_running(name)
    number = int(worker.node[-1])
    uid = machines.get_node_object(number)["metadata"]["uid"]
    node = machines.get_node(number)
    node.vanish()
    machines.wait(10.0)
    node.power_on()
    machines.wait_until(lambda: machines.get_phase(name) == "Failed", 30.0)
    assert machines.get_termination(name)["reason"] == "ContainerStatusUnknown"
    assert machines.get_node_object(number)["metadata"]["uid"] != uid


def test_pods_of_a_node_that_is_gone_are_collected() -> None:
    machines = MachinesHarness()
    name = machines.create_worker_pod()
    worker = machines.is_running(name)
    machines.node_pool.nodes[worker.node].vanish()
    assert 39.0 <= machines.wait_until(lambda: machines.find_pod(name) is None, 90.0) <= 61.0
    said = [change.object for change in machines.changes if change.plural == "pods" and change.type == "MODIFIED"][-1]
    assert view_pod(said).disruption_reason == "DeletionByPodGC"


def test_a_deleted_node_whose_kubelet_goes_on_comes_back_when_the_kubelet_is_restarted() -> None:
    machines = MachinesHarness()
    name = machines.create_worker_pod()
    worker = machines.is_running(name)
    node = machines.node_pool.nodes[worker.node]
    node.remove()
    machines.wait(5.0)
    assert machines.api.get("nodes", node.name) is None
    node.stop_kubelet()
    node.start_kubelet()
    assert machines.api.get("nodes", node.name) is not None
    machines.wait(120.0)
    assert worker.alive
    assert machines.get_phase(name) == "Running"


def test_draining_evicts_with_a_reason() -> None:
    machines = MachinesHarness()
    name = machines.create_worker_pod()
    worker = machines.is_running(name)
    number = int(worker.node[-1])
    machines.get_node(number).drain()
    machines.wait_until(lambda: machines.get_condition(name, "DisruptionTarget"))
    assert view_pod(machines.get_pod(name)).disruption_reason == "EvictionByEvictionAPI"
    assert view_pod(machines.get_pod(name)).deleting
    machines.wait_until(lambda: machines.find_pod(name) is None)
    assert machines.list_taints(number) == ["unschedulable:NoSchedule"]
    machines.get_node(number).uncordon()
    machines.wait_until(lambda: machines.list_taints(number) == [])


def test_a_node_that_shuts_down_ends_its_pods_first() -> None:
    machines = MachinesHarness()
    name = machines.create_worker_pod()
    worker = machines.is_running(name)
    machines.node_pool.nodes[worker.node].shut_down(grace=5.0)
    machines.wait_until(lambda: machines.get_phase(name) == "Failed", 8.0)
    assert machines.get_pod(name)["status"]["reason"] == "Terminated"
    assert view_pod(machines.get_pod(name)).disruption_reason == "TerminationByKubelet"
    assert worker.messages[:2] == ["start", "terminate 5"]
    machines.wait_until(lambda: not machines.node_pool.nodes[worker.node].powered, 10.0)


def test_eviction_by_pressure_leaves_a_failed_pod() -> None:
    machines = MachinesHarness()
    name = machines.create_worker_pod()
    worker = machines.is_running(name)
    machines.node_pool.nodes[worker.node].evict(machines.get_pod(name)["metadata"]["uid"])
    machines.wait_until(lambda: machines.get_phase(name) == "Failed", 5.0)
    assert machines.get_pod(name)["status"]["reason"] == "Evicted"
    assert view_pod(machines.get_pod(name)).disruption_reason == "TerminationByKubelet"


def test_a_kubelet_that_refuses_pods_makes_them_fail_at_once() -> None:
    machines = MachinesHarness()
    for node in machines.node_pool.nodes.values():
        node.refuses = "UnexpectedAdmissionError"
    name = machines.create_worker_pod()
    machines.wait_until(lambda: machines.get_phase(name) == "Failed", 5.0)
    assert machines.get_pod(name)["status"]["reason"] == "UnexpectedAdmissionError"
    assert view_pod(machines.get_pod(name)).exit_code is None
    assert not machines.workers


def test_an_image_that_cannot_be_pulled_is_told_and_tried_again() -> None:
    machines = MachinesHarness()
    for node in machines.node_pool.nodes.values():
        node.images = ImagePulls.FAIL
    name = machines.create_worker_pod()
    machines.wait_until(lambda: view_pod(machines.get_pod(name)).waiting_reason == "ErrImagePull", 5.0)
    machines.wait(30.0)
    assert machines.get_phase(name) == "Pending"
    for node in machines.node_pool.nodes.values():
        node.images = ImagePulls.SUCCEED
    machines.is_running(name)


def test_a_sidecar_that_does_not_answer_is_restarted_after_three_looks() -> None:
    machines = MachinesHarness()
    name = machines.create_worker_pod()
    worker = machines.is_running(name)
    worker.sidecar.pause()
    machines.wait(19.0)
    assert worker.messages == ["start"]
    machines.wait(12.0)
    assert worker.messages == ["start", "restart sidecar"]
    machines.wait(1.0)
    assert machines.get_pod(name)["status"]["initContainerStatuses"][0]["restartCount"] == 1


def test_who_listens() -> None:
    machines = MachinesHarness()
    worker = machines.is_running(machines.create_worker_pod())
    node = machines.node_pool.nodes[worker.node]
    listens = machines.node_pool.is_listening
    assert listens(node.address, SIMULATED_KUBELET_PORT)
    assert listens(worker.address, METRICS_PORT)
    worker.sidecar.pause()
    assert listens(worker.address, METRICS_PORT)  # the kernel does it
    worker.sidecar.kill()
    assert not listens(worker.address, METRICS_PORT)
    node.stop_kubelet()
    assert not listens(node.address, SIMULATED_KUBELET_PORT)


def test_a_container_runtime_that_hangs_neither_starts_nor_ends_anything() -> None:
    machines = MachinesHarness(nodes=1)
    first = machines.create_worker_pod(0)
    worker = machines.is_running(first)
    machines.get_node(0).hang_runtime()
    second = machines.create_worker_pod(1)
    machines.api.delete("pods", first, NAMESPACE)
    machines.wait(60.0)
    assert worker.alive
    assert machines.get_phase(second) == "Pending"
    assert machines.list_taints(0) == []
    machines.wait_until(lambda: "not-ready:NoSchedule" in machines.list_taints(0), 130.0)
    machines.get_node(0).mend_runtime()
    machines.wait_until(lambda: machines.find_pod(first) is None, 20.0)
    machines.is_running(second)


def test_probes_pass_on_a_good_node_though_it_is_cordoned() -> None:
    machines = MachinesHarness()
    machines.get_node(1).cordon()
    name = machines.create_probe_pod(1)
    machines.wait_until(lambda: machines.get_phase(name) == "Succeeded", 10.0)


def test_probes_fail_on_a_sick_node_and_say_why() -> None:
    machines = MachinesHarness()
    machines.get_node(1).fault_message = "GPU-1 has 3 uncorrected memory errors since its last reset"
    name = machines.create_probe_pod(1)
    machines.wait_until(lambda: machines.get_phase(name) == "Failed", 10.0)
    found = ProbePod.parse(machines.get_pod(name))
    assert found.inconclusive is None
    assert "GPU-1" in found.message


@pytest.mark.parametrize("check", ["network", "driver"])
def test_probes_fail_one_check_on_all_nodes(check: str) -> None:
    machines = MachinesHarness()
    machines.node_pool.fail_probes(check)
    machines.world.add_node()
    names = [machines.create_probe_pod(number) for number in (1, 3)]
    for name in names:
        machines.wait_until(lambda name=name: machines.get_phase(name) == "Failed", 60.0)  # type: ignore[misc]
        assert ProbePod.parse(machines.get_pod(name)).failed_check == check
    machines.node_pool.fail_probes("")
    name = machines.create_probe_pod(2)
    machines.wait_until(lambda: machines.get_phase(name) == "Succeeded", 10.0)


def test_probes_say_nothing_where_the_kubelet_refuses_them_or_the_image_does_not_come() -> None:
    machines = MachinesHarness()
    machines.get_node(0).refuses = "OutOfcpu"
    machines.get_node(1).images = ImagePulls.HANG
    refused, waiting = machines.create_probe_pod(0), machines.create_probe_pod(1)
    machines.wait_until(lambda: machines.get_phase(refused) == "Failed", 10.0)
    assert ProbePod.parse(machines.get_pod(refused)).inconclusive == "NotRun"
    machines.wait(5.0)
    assert ProbePod.parse(machines.get_pod(waiting)).inconclusive == "Image"
    machines.wait_until(lambda: machines.get_phase(waiting) == "Failed", 130.0)
    assert machines.get_pod(waiting)["status"]["reason"] == "DeadlineExceeded"


def test_a_probe_that_the_full_node_has_no_room_for_is_refused() -> None:
    machines = MachinesHarness(nodes=1, cpu=2)
    for ordinal in range(1):
        machines.is_running(machines.create_worker_pod(ordinal))
    machines.is_running(
        machines.create_worker_pod(1, spec={"containers": [{**TRAINER, "resources": {"requests": {"cpu": "950m"}}}]})
    )
    name = machines.create_probe_pod(0)
    machines.wait_until(lambda: machines.get_phase(name) == "Failed", 10.0)
    assert machines.get_pod(name)["status"]["reason"] == "OutOfcpu"


def test_other_peoples_taints_stay_when_a_node_comes_and_goes() -> None:
    machines = MachinesHarness()
    machines.get_node(0).taint("example.com/maintenance", "NoSchedule")
    machines.get_node(0).stop_kubelet()
    machines.wait_until(lambda: "unreachable:NoExecute" in machines.list_taints(0), 60.0)
    machines.get_node(0).start_kubelet()
    machines.wait_until(lambda: machines.list_taints(0) == ["maintenance:NoSchedule"], 10.0)
    machines.get_node(0).untaint("example.com/maintenance")
    assert machines.list_taints(0) == []


def test_a_node_out_of_service_loses_the_pods_that_are_being_deleted() -> None:
    machines = MachinesHarness()
    name = machines.create_worker_pod()
    worker = machines.is_running(name)
    number = int(worker.node[-1])
    machines.get_node(number).power_off()
    machines.wait_until(lambda: machines.list_taints(number), 60.0)
    machines.get_node(number).taint("node.kubernetes.io/out-of-service", "NoExecute", "nodeshutdown")
    machines.wait_until(lambda: machines.find_pod(name) is None, 5.0)


def test_a_node_that_is_back_in_time_keeps_its_pods_and_the_next_outage_counts_from_its_own_beginning() -> None:
    machines = MachinesHarness()
    name = machines.create_worker_pod()
    worker = machines.is_running(name)
    node, number = machines.node_pool.nodes[worker.node], int(worker.node[-1])
    for _ in range(2):
        node.stop_kubelet()
        machines.wait_until(lambda: "unreachable:NoExecute" in machines.list_taints(number))
        machines.wait(250.0)
        node.start_kubelet()
        machines.wait_until(lambda: not machines.list_taints(number))
    machines.wait(400.0)
    assert worker.alive
    assert "deletionTimestamp" not in machines.get_pod(name)["metadata"]


def test_when_fewer_nodes_are_silent_their_pods_are_taken_away_after_all() -> None:
    machines = MachinesHarness()
    for node in machines.node_pool.nodes.values():
        node.power_off()
    machines.wait(120.0)
    assert machines.list_taints(0) == ["unreachable:NoSchedule"]
    machines.get_node(2).power_on()
    machines.wait_until(lambda: "unreachable:NoExecute" in machines.list_taints(0), 30.0)


def test_no_controller_acts_while_the_api_server_is_away() -> None:
    machines = MachinesHarness()
    name = machines.create_worker_pod()
    worker = machines.is_running(name)
    machines.node_pool.nodes[worker.node].power_off()
    machines.wait(300.0)
    machines.api.faults.silent = True
    machines.wait(100.0)
    assert "deletionTimestamp" not in machines.get_pod(name)["metadata"]
    machines.api.faults.silent = False
    machines.wait_until(lambda: "deletionTimestamp" in machines.get_pod(name)["metadata"], 2.0)


def test_pods_stay_on_a_tainted_node_for_as_long_as_they_tolerate_it() -> None:
    machines = MachinesHarness(nodes=1)
    machines.get_node(0).taint("example.com/repair", "NoExecute")
    toleration = {"key": "example.com/repair", "operator": "Exists"}
    short = machines.create_worker_pod(
        0, spec={"tolerations": [{**toleration, "effect": "NoExecute", "tolerationSeconds": 60}]}
    )
    patient = machines.create_worker_pod(1, spec={"tolerations": [toleration]})
    machines.is_running(patient)
    machines.is_running(short)
    took = machines.wait_until(lambda: machines.find_pod(short) is None, 90.0)
    assert 55.0 <= took <= 65.0
    assert machines.get_phase(patient) == "Running"
    machines.get_node(0).untaint("example.com/repair")
    machines.is_running(machines.create_worker_pod(2))
    machines.get_node(0).taint("example.com/repair", "NoExecute")
    machines.wait_until(lambda: "deletionTimestamp" in machines.get_pod("j-w2-0")["metadata"], 1.0)
    assert machines.get_phase(patient) == "Running"


def test_a_pod_bound_to_a_node_that_does_not_exist_is_collected() -> None:
    machines = MachinesHarness(nodes=1)
    name = machines.create_probe_pod(7)
    machines.wait(35.0)
    assert machines.get_phase(name) == "Pending"
    machines.wait_until(lambda: machines.find_pod(name) is None, 30.0)


def test_only_what_is_being_deleted_on_a_silent_node_out_of_service_is_taken_by_force() -> None:
    machines = MachinesHarness(nodes=1)
    key = "node.kubernetes.io/out-of-service"
    spec = {"tolerations": [{"operator": "Exists"}]}
    kept, taken = machines.create_worker_pod(0, spec=spec), machines.create_worker_pod(1, spec=spec)
    machines.is_running(kept)
    machines.is_running(taken).takes = 100.0
    machines.api.delete("pods", taken, NAMESPACE, grace=100)
    machines.get_node(0).taint(key, "NoExecute")
    machines.wait(5.0)
    assert machines.get_phase(taken) == "Running"  # the node is well
    machines.get_node(0).power_off()
    machines.wait_until(lambda: machines.list_taints(0) != ["out-of-service:NoExecute"], 60.0)
    machines.wait_until(lambda: machines.find_pod(taken) is None, 5.0)
    assert machines.get_phase(kept) == "Running"


def test_a_kubelet_that_restarts_goes_on_with_what_it_had_begun() -> None:
    machines = MachinesHarness(nodes=1)
    worker = machines.is_running(machines.create_worker_pod(0))
    starting = machines.create_worker_pod(1)
    machines.wait_until(lambda: view_pod(machines.get_pod(starting)).node)
    machines.wait(0.31)
    machines.get_node(0).stop_kubelet()
    machines.wait(10.0)
    assert machines.get_phase(starting) == "Pending"
    machines.get_node(0).start_kubelet()
    machines.is_running(starting)
    machines.get_node(0).images = ImagePulls.FAIL
    late = machines.create_worker_pod(2)
    probe = machines.create_probe_pod(0)
    machines.wait_until(lambda: view_pod(machines.get_pod(late)).waiting_reason == "ErrImagePull", 5.0)
    machines.get_node(0).stop_kubelet()
    machines.get_node(0).start_kubelet()
    machines.wait(20.0)
    machines.get_node(0).images = ImagePulls.SUCCEED
    machines.get_node(0).hang_runtime()
    worker.sidecar.pause()
    machines.wait_until(lambda: "restart sidecar" in worker.messages, 45.0)
    machines.wait_until(lambda: machines.get_phase(probe) == "Failed", 130.0)
    assert machines.get_pod(probe)["status"]["reason"] == "DeadlineExceeded"
    machines.get_node(0).mend_runtime()
    machines.is_running(late)


def test_a_workers_address_is_free_after_a_power_failure_and_a_nodes_own_never() -> None:
    machines = MachinesHarness(nodes=1)
    own, hosts = machines.create_worker_pod(0), machines.create_worker_pod(1, spec={"hostNetwork": True})
    address = machines.is_running(own).address
    assert machines.is_running(hosts).address == machines.get_node(0).address
    machines.is_running(hosts).end(1)
    machines.wait_until(lambda: machines.get_phase(hosts) == "Failed")
    assert machines.get_node(0).address in machines.world.network.addresses
    machines.get_node(0).power_off()
    assert address not in machines.world.network.addresses


def test_two_ends_of_one_pod_are_told_as_the_first() -> None:
    machines = MachinesHarness()
    name = machines.create_worker_pod()
    worker = machines.is_running(name)
    machines.node_pool.nodes[worker.node].evict(machines.get_pod(name)["metadata"]["uid"])
    worker.end(0)
    machines.wait_until(lambda: machines.get_phase(name) == "Failed", 5.0)
    machines.node_pool.nodes[worker.node].evict(machines.get_pod(name)["metadata"]["uid"])
    worker.exited(9, "Error")
    machines.wait(5.0)
    assert machines.get_termination(name)["exitCode"] == 0  # it had ended well, and yet it was evicted
    assert machines.get_pod(name)["status"]["reason"] == "Evicted"


def test_power_that_comes_and_goes_while_a_node_boots() -> None:
    machines = MachinesHarness(nodes=1)
    node = machines.get_node(0)
    node.power_off()
    node.power_on()
    machines.wait(1.0)
    node.power_off()
    machines.wait(60.0)
    assert not node.powered
    assert not machines.world.network.can_reach("node-0", "api")
    node.power_on()
    machines.wait_until(lambda: node.powered, 16.0)
    machines.is_running(machines.create_worker_pod())


def test_an_empty_namespace_goes() -> None:
    machines = MachinesHarness()
    machines.api.create("namespaces", {"metadata": {"name": "empty"}})
    machines.api.delete("namespaces", "empty")
    machines.wait_until(lambda: machines.api.get("namespaces", "empty") is None, 1.0)


def test_kubelets_forget_what_is_gone() -> None:
    machines = MachinesHarness(nodes=1)
    for ordinal, grace in enumerate((None, 0)):
        name = machines.create_worker_pod(ordinal)
        machines.is_running(name)
        machines.api.delete("pods", name, NAMESPACE, grace=grace)
    machines.wait(30.0)
    assert not machines.get_node(0).kubelet._pods


def test_the_statuses_that_a_restarted_worker_writes_are_few() -> None:
    machines = MachinesHarness(nodes=1)
    name = machines.create_worker_pod()
    machines.is_running(name).end(1)
    machines.wait(300.0)
    writes = [change.verb for change in machines.changes if change.plural == "pods"]
    assert len(writes) <= 6  # created, bound, creating, running, exited, ended


def test_a_deleted_namespace_is_emptied_and_goes() -> None:
    machines = MachinesHarness()
    worker = machines.is_running(machines.create_worker_pod())
    worker.takes = 4.0
    machines.api.create("configmaps", {"metadata": {"name": "c", "namespace": NAMESPACE}})
    machines.api.patch("trainingjobs", "j", NAMESPACE, {"metadata": {"finalizers": ["pacekeeper.dev/job"]}})
    machines.api.delete("namespaces", NAMESPACE)
    machines.wait(10.0)
    assert not worker.alive
    assert not machines.api.list_all("pods") + machines.api.list_all("configmaps")
    assert machines.api.get("namespaces", NAMESPACE) is not None
    machines.api.patch("trainingjobs", "j", NAMESPACE, {"metadata": {"finalizers": None}})
    machines.wait_until(lambda: machines.api.get("namespaces", NAMESPACE) is None, 2.0)


def test_a_terminating_pod_still_counts_in_the_quota() -> None:
    machines = MachinesHarness()
    quota = {"metadata": {"name": "q", "namespace": NAMESPACE}, "spec": {"hard": {"pods": "1"}}}
    machines.api.create("resourcequotas", quota)
    machines.wait(1.0)
    name = machines.create_worker_pod()
    worker = machines.is_running(name)
    worker.takes = 5.0
    machines.api.delete("pods", name, NAMESPACE)
    with pytest.raises(ApiError, match="exceeded quota"):
        machines.create_worker_pod(1)
    machines.wait_until(lambda: machines.find_pod(name) is None)
    machines.wait(1.0)
    machines.is_running(machines.create_worker_pod(1))


def test_a_run_follows_from_its_seed() -> None:
    def digest(seed: int) -> str:
        machines = MachinesHarness(seed)
        names = [machines.create_worker_pod(ordinal) for ordinal in range(4)]
        machines.wait(5.0)
        machines.node_pool.nodes[machines.get_node_name(names[0])].power_off()
        machines.wait(60.0)
        return machines.world.log.digest()

    assert digest(1) == digest(1)
    assert digest(1) != digest(2)
