"""Simulated machines: what becomes of pods when things go wrong with the nodes that they run on."""

from __future__ import annotations

import pytest

from pacekeeper_operator.api import METRICS_PORT
from pacekeeper_operator.decide.node_steps import ProbePod
from pacekeeper_operator.observe.views import view_pod
from simulation.kubernetes.errors import ApiError
from simulation.kubernetes.kubelet import Images
from simulation.network import KUBELET_PORT
from tests.support.simulated_machines import NAMESPACE, TRAINER, Machines


def test_a_worker_is_placed_started_and_told_of() -> None:
    machines = Machines()
    name = machines.worker()
    worker = machines.runs(name)
    view = view_pod(machines.there(name))
    assert view.started
    assert view.node == worker.node
    assert view.address == worker.address
    assert machines.world.network.addresses[view.address] == view.node
    containers = machines.there(name)["status"]["initContainerStatuses"]
    assert [container["state"].keys() for container in containers] == [{"running"}]
    assert [container["ready"] for container in containers] == [True]
    conditions = {"PodScheduled", "PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady"}
    assert {type_ for type_ in conditions if machines.condition(name, type_)["status"] == "True"} == conditions


def test_an_end_and_its_report_are_apart_and_the_sidecar_ends_after_the_trainer() -> None:
    machines = Machines()
    name = machines.worker()
    worker = machines.runs(name)
    worker.end(1, "Error", "ValueError: x")
    assert not view_pod(machines.there(name)).ended
    assert 0.05 <= machines.until(lambda: view_pod(machines.there(name)).exit_code == 1) <= 0.65
    assert machines.phase(name) == "Running"
    assert [c["state"].keys() for c in machines.there(name)["status"]["initContainerStatuses"]] == [{"running"}]
    machines.until(lambda: machines.phase(name) == "Failed")
    assert worker.words == ["start", "exit 1", "kill"]
    assert machines.condition(name, "Ready")["status"] == "False"
    assert view_pod(machines.there(name)).exit_message == "ValueError: x"
    assert worker.address not in machines.world.network.addresses


def test_a_trainer_that_ends_well_makes_a_pod_that_has_succeeded() -> None:
    machines = Machines()
    name = machines.worker()
    machines.runs(name).end(0)
    machines.until(lambda: machines.phase(name) == "Succeeded")
    assert machines.terminated(name)["reason"] == "Completed"


def test_a_deleted_pod_is_told_to_end_and_goes_when_it_has() -> None:
    machines = Machines()
    name = machines.worker()
    worker = machines.runs(name)
    machines.api.delete("pods", name, NAMESPACE)
    machines.until(lambda: machines.pod(name) is None)
    assert worker.words == ["start", "terminate 10", "exit 143", "kill"]


def test_a_shorter_grace_shortens_an_end_under_way() -> None:
    machines = Machines()
    name = machines.worker()
    worker = machines.runs(name)
    worker.takes = 100.0
    machines.api.delete("pods", name, NAMESPACE)
    machines.wait(1.0)
    machines.api.delete("pods", name, NAMESPACE, grace=2)
    assert machines.until(lambda: machines.pod(name) is None) < 5.0
    assert worker.words[:3] == ["start", "terminate 10", "terminate 2"]


def test_a_pod_deleted_before_it_has_started_never_runs() -> None:
    machines = Machines()
    name = machines.worker()
    machines.until(lambda: machines.place(name))
    machines.api.delete("pods", name, NAMESPACE)
    machines.until(lambda: machines.pod(name) is None, 5.0)
    machines.wait(10.0)
    assert not machines.workers


def test_with_grace_0_the_object_goes_at_once_and_the_process_later() -> None:
    machines = Machines()
    name = machines.worker()
    worker = machines.runs(name)
    machines.api.delete("pods", name, NAMESPACE, grace=0)
    assert machines.pod(name) is None
    assert worker.alive
    machines.until(lambda: not worker.alive, 15.0)
    machines.until(lambda: worker.address not in machines.world.network.addresses)


def test_a_name_used_again_after_a_forced_removal_is_another_pod() -> None:
    machines = Machines()
    name = machines.worker()
    old = machines.runs(name)
    old.takes = 100.0
    machines.api.delete("pods", name, NAMESPACE, grace=0)
    machines.worker()
    new = machines.runs(name)
    assert new is not old
    machines.until(lambda: not old.alive, 15.0)
    machines.wait(5.0)
    assert new.alive
    assert machines.phase(name) == "Running"


def test_a_node_without_power_says_nothing_and_its_pods_stay_until_they_are_evicted() -> None:
    machines = Machines()
    name = machines.worker()
    worker = machines.runs(name)
    machines.fleet.nodes[worker.node].power_off()
    assert not worker.alive
    number = int(worker.node[-1])
    took = machines.until(lambda: "unreachable:NoExecute" in machines.taints(number))
    assert 35.0 <= took <= 50.0
    assert machines.phase(name) == "Running"
    took = machines.until(lambda: "deletionTimestamp" in machines.there(name)["metadata"], 400.0)
    assert 299.0 <= took <= 305.0
    assert machines.condition(name, "DisruptionTarget")["reason"] == "DeletionByTaintManager"
    machines.wait(600.0)
    assert "deletionTimestamp" in machines.there(name)["metadata"]  # there is nobody to say that it has ended


def test_after_a_reboot_what_ran_has_failed() -> None:
    machines = Machines()
    name = machines.worker()
    worker = machines.runs(name)
    node = machines.fleet.nodes[worker.node]
    node.power_off()
    machines.wait(10.0)
    node.power_on()
    machines.until(lambda: machines.phase(name) == "Failed", 20.0)
    assert (machines.terminated(name)["exitCode"], machines.terminated(name)["reason"]) == (
        137,
        "ContainerStatusUnknown",
    )
    assert "unreachable:NoExecute" not in machines.taints(int(worker.node[-1]))


def test_a_pod_that_was_terminating_when_the_power_failed_goes_after_the_reboot() -> None:
    machines = Machines()
    name = machines.worker()
    worker = machines.runs(name)
    worker.takes = 8.0
    machines.api.delete("pods", name, NAMESPACE)
    machines.wait(1.0)
    machines.fleet.nodes[worker.node].power_off()
    machines.wait(60.0)
    assert machines.pod(name) is not None
    machines.fleet.nodes[worker.node].power_on()
    machines.until(lambda: machines.pod(name) is None, 20.0)


def test_a_pod_that_was_deleted_while_its_node_was_off_goes_after_the_reboot() -> None:
    machines = Machines()
    name = machines.worker()
    worker = machines.runs(name)
    machines.fleet.nodes[worker.node].power_off()
    machines.api.delete("pods", name, NAMESPACE)
    machines.wait(30.0)
    machines.fleet.nodes[worker.node].power_on()
    machines.until(lambda: machines.pod(name) is None, 20.0)


def test_an_end_that_the_power_failure_kept_from_being_told_is_told_after_the_reboot() -> None:
    machines = Machines()
    name = machines.worker()
    worker = machines.runs(name)
    worker.end(3, "Error")
    machines.fleet.nodes[worker.node].power_off()
    machines.wait(5.0)
    assert machines.phase(name) == "Running"
    machines.fleet.nodes[worker.node].power_on()
    machines.until(lambda: machines.phase(name) == "Failed", 20.0)
    assert machines.terminated(name)["exitCode"] == 3


def test_a_kubelet_that_is_away_hears_and_tells_nothing_and_the_containers_go_on() -> None:
    machines = Machines()
    first, second = machines.worker(0), machines.worker(1)
    one, other = machines.runs(first), machines.runs(second)
    for node in machines.fleet.nodes.values():
        node.stop_kubelet()
    one.end(1)
    machines.api.delete("pods", second, NAMESPACE)
    machines.wait(60.0)
    assert other.alive
    assert machines.phase(first) == "Running"
    assert set(machines.taints(0)) == {"unreachable:NoSchedule"}  # all nodes are silent: nobody is evicted
    for node in machines.fleet.nodes.values():
        node.start_kubelet()
    machines.until(lambda: machines.phase(first) == "Failed", 5.0)
    machines.until(lambda: machines.pod(second) is None, 20.0)
    machines.until(lambda: machines.taints(0) == [], 10.0)


def test_a_node_cut_from_the_api_server_tells_when_it_is_back() -> None:
    machines = Machines()
    first, second, third = (machines.worker(i) for i in range(3))
    workers = [machines.runs(name) for name in (first, second, third)]
    for node in machines.fleet.nodes:
        machines.world.network.cut(node, "api")
    workers[0].end(1)
    machines.api.delete("pods", second, NAMESPACE)
    machines.api.delete("pods", third, NAMESPACE, grace=0)
    machines.wait(30.0)
    assert workers[1].alive
    assert workers[2].alive
    assert machines.phase(first) == "Running"
    machines.world.network.heal()
    machines.until(lambda: machines.phase(first) == "Failed", 5.0)
    machines.until(lambda: machines.pod(second) is None, 20.0)
    machines.until(lambda: not workers[2].alive, 20.0)


def test_an_api_server_that_is_down_stops_all_of_them() -> None:
    machines = Machines()
    name = machines.worker()
    worker = machines.runs(name)
    machines.api.faults.down = True
    worker.end(1)
    other = machines.worker(1)
    machines.wait(90.0)
    assert machines.phase(name) == "Running"
    assert machines.place(other) == ""
    machines.api.faults.down = False
    machines.until(lambda: machines.phase(name) == "Failed", 5.0)
    machines.runs(other)
    machines.wait(10.0)
    assert machines.taints(0) == []


def test_another_machine_of_the_same_name_knows_nothing_of_the_pods_of_the_first() -> None:
    machines = Machines()
    name = machines.worker()
    worker = machines.runs(name)
    number = int(worker.node[-1])
    uid = machines.stored(number)["metadata"]["uid"]
    node = machines.node(number)
    node.vanish()
    machines.wait(10.0)
    node.power_on()
    machines.until(lambda: machines.phase(name) == "Failed", 30.0)
    assert machines.terminated(name)["reason"] == "ContainerStatusUnknown"
    assert machines.stored(number)["metadata"]["uid"] != uid


def test_pods_of_a_node_that_is_gone_are_collected() -> None:
    machines = Machines()
    name = machines.worker()
    worker = machines.runs(name)
    machines.fleet.nodes[worker.node].vanish()
    assert 39.0 <= machines.until(lambda: machines.pod(name) is None, 90.0) <= 61.0
    said = [change.object for change in machines.changes if change.plural == "pods" and change.type == "MODIFIED"][-1]
    assert view_pod(said).disrupted == "DeletionByPodGC"


def test_a_deleted_node_whose_kubelet_goes_on_comes_back_when_the_kubelet_is_restarted() -> None:
    machines = Machines()
    name = machines.worker()
    worker = machines.runs(name)
    node = machines.fleet.nodes[worker.node]
    node.remove()
    machines.wait(5.0)
    assert machines.api.get("nodes", node.name) is None
    node.stop_kubelet()
    node.start_kubelet()
    assert machines.api.get("nodes", node.name) is not None
    machines.wait(120.0)
    assert worker.alive
    assert machines.phase(name) == "Running"


def test_draining_evicts_with_a_reason() -> None:
    machines = Machines()
    name = machines.worker()
    worker = machines.runs(name)
    number = int(worker.node[-1])
    machines.node(number).drain()
    machines.until(lambda: machines.condition(name, "DisruptionTarget"))
    assert view_pod(machines.there(name)).disrupted == "EvictionByEvictionAPI"
    assert view_pod(machines.there(name)).deleting
    machines.until(lambda: machines.pod(name) is None)
    assert machines.taints(number) == ["unschedulable:NoSchedule"]
    machines.node(number).uncordon()
    machines.until(lambda: machines.taints(number) == [])


def test_a_node_that_shuts_down_ends_its_pods_first() -> None:
    machines = Machines()
    name = machines.worker()
    worker = machines.runs(name)
    machines.fleet.nodes[worker.node].shut_down(grace=5.0)
    machines.until(lambda: machines.phase(name) == "Failed", 8.0)
    assert machines.there(name)["status"]["reason"] == "Terminated"
    assert view_pod(machines.there(name)).disrupted == "TerminationByKubelet"
    assert worker.words[:2] == ["start", "terminate 5"]
    machines.until(lambda: not machines.fleet.nodes[worker.node].powered, 10.0)


def test_eviction_by_pressure_leaves_a_failed_pod() -> None:
    machines = Machines()
    name = machines.worker()
    worker = machines.runs(name)
    machines.fleet.nodes[worker.node].evict(machines.there(name)["metadata"]["uid"])
    machines.until(lambda: machines.phase(name) == "Failed", 5.0)
    assert machines.there(name)["status"]["reason"] == "Evicted"
    assert view_pod(machines.there(name)).disrupted == "TerminationByKubelet"


def test_a_kubelet_that_refuses_pods_makes_them_fail_at_once() -> None:
    machines = Machines()
    for node in machines.fleet.nodes.values():
        node.refuses = "UnexpectedAdmissionError"
    name = machines.worker()
    machines.until(lambda: machines.phase(name) == "Failed", 5.0)
    assert machines.there(name)["status"]["reason"] == "UnexpectedAdmissionError"
    assert view_pod(machines.there(name)).exit_code is None
    assert not machines.workers


def test_an_image_that_cannot_be_pulled_is_told_and_tried_again() -> None:
    machines = Machines()
    for node in machines.fleet.nodes.values():
        node.images = Images.FAIL
    name = machines.worker()
    machines.until(lambda: view_pod(machines.there(name)).waiting_reason == "ErrImagePull", 5.0)
    machines.wait(30.0)
    assert machines.phase(name) == "Pending"
    for node in machines.fleet.nodes.values():
        node.images = Images.COME
    machines.runs(name)


def test_a_sidecar_that_does_not_answer_is_restarted_after_three_looks() -> None:
    machines = Machines()
    name = machines.worker()
    worker = machines.runs(name)
    worker.sidecar.pause()
    machines.wait(19.0)
    assert worker.words == ["start"]
    machines.wait(12.0)
    assert worker.words == ["start", "restart sidecar"]
    machines.wait(1.0)
    assert machines.there(name)["status"]["initContainerStatuses"][0]["restartCount"] == 1


def test_who_listens() -> None:
    machines = Machines()
    worker = machines.runs(machines.worker())
    node = machines.fleet.nodes[worker.node]
    listens = machines.fleet.listens
    assert listens(node.address, KUBELET_PORT)
    assert listens(worker.address, METRICS_PORT)
    worker.sidecar.pause()
    assert listens(worker.address, METRICS_PORT)  # the kernel does it
    worker.sidecar.kill()
    assert not listens(worker.address, METRICS_PORT)
    node.stop_kubelet()
    assert not listens(node.address, KUBELET_PORT)


def test_a_container_runtime_that_hangs_neither_starts_nor_ends_anything() -> None:
    machines = Machines(nodes=1)
    first = machines.worker(0)
    worker = machines.runs(first)
    machines.node(0).hang_runtime()
    second = machines.worker(1)
    machines.api.delete("pods", first, NAMESPACE)
    machines.wait(60.0)
    assert worker.alive
    assert machines.phase(second) == "Pending"
    assert machines.taints(0) == []
    machines.until(lambda: "not-ready:NoSchedule" in machines.taints(0), 130.0)
    machines.node(0).mend_runtime()
    machines.until(lambda: machines.pod(first) is None, 20.0)
    machines.runs(second)


def test_probes_pass_on_a_good_node_though_it_is_cordoned() -> None:
    machines = Machines()
    machines.node(1).cordon()
    name = machines.probe(1)
    machines.until(lambda: machines.phase(name) == "Succeeded", 10.0)


def test_probes_fail_on_a_sick_node_and_say_why() -> None:
    machines = Machines()
    machines.node(1).sick = "GPU-1 has 3 uncorrected memory errors since its last reset"
    name = machines.probe(1)
    machines.until(lambda: machines.phase(name) == "Failed", 10.0)
    found = ProbePod.parse(machines.there(name))
    assert found.inconclusive is None
    assert "GPU-1" in found.message


@pytest.mark.parametrize("check", ["network", "driver"])
def test_probes_fail_one_check_on_all_nodes(check: str) -> None:
    machines = Machines()
    machines.fleet.fail_probes(check)
    machines.world.add_node()
    names = [machines.probe(number) for number in (1, 3)]
    for name in names:
        machines.until(lambda name=name: machines.phase(name) == "Failed", 60.0)  # type: ignore[misc]
        assert ProbePod.parse(machines.there(name)).failed_check == check
    machines.fleet.fail_probes("")
    name = machines.probe(2)
    machines.until(lambda: machines.phase(name) == "Succeeded", 10.0)


def test_probes_say_nothing_where_the_kubelet_refuses_them_or_the_image_does_not_come() -> None:
    machines = Machines()
    machines.node(0).refuses = "OutOfcpu"
    machines.node(1).images = Images.HANG
    refused, waiting = machines.probe(0), machines.probe(1)
    machines.until(lambda: machines.phase(refused) == "Failed", 10.0)
    assert ProbePod.parse(machines.there(refused)).inconclusive == "NotRun"
    machines.wait(5.0)
    assert ProbePod.parse(machines.there(waiting)).inconclusive == "Image"
    machines.until(lambda: machines.phase(waiting) == "Failed", 130.0)
    assert machines.there(waiting)["status"]["reason"] == "DeadlineExceeded"


def test_a_probe_that_the_full_node_has_no_room_for_is_refused() -> None:
    machines = Machines(nodes=1, cpu=2)
    for ordinal in range(1):
        machines.runs(machines.worker(ordinal))
    machines.runs(machines.worker(1, spec={"containers": [{**TRAINER, "resources": {"requests": {"cpu": "950m"}}}]}))
    name = machines.probe(0)
    machines.until(lambda: machines.phase(name) == "Failed", 10.0)
    assert machines.there(name)["status"]["reason"] == "OutOfcpu"


def test_other_peoples_taints_stay_when_a_node_comes_and_goes() -> None:
    machines = Machines()
    machines.node(0).taint("example.com/maintenance", "NoSchedule")
    machines.node(0).stop_kubelet()
    machines.until(lambda: "unreachable:NoExecute" in machines.taints(0), 60.0)
    machines.node(0).start_kubelet()
    machines.until(lambda: machines.taints(0) == ["maintenance:NoSchedule"], 10.0)
    machines.node(0).untaint("example.com/maintenance")
    assert machines.taints(0) == []


def test_a_node_out_of_service_loses_the_pods_that_are_being_deleted() -> None:
    machines = Machines()
    name = machines.worker()
    worker = machines.runs(name)
    number = int(worker.node[-1])
    machines.node(number).power_off()
    machines.until(lambda: machines.taints(number), 60.0)
    machines.node(number).taint("node.kubernetes.io/out-of-service", "NoExecute", "nodeshutdown")
    machines.until(lambda: machines.pod(name) is None, 5.0)


def test_a_node_that_is_back_in_time_keeps_its_pods_and_the_next_outage_counts_from_its_own_beginning() -> None:
    machines = Machines()
    name = machines.worker()
    worker = machines.runs(name)
    node, number = machines.fleet.nodes[worker.node], int(worker.node[-1])
    for _ in range(2):
        node.stop_kubelet()
        machines.until(lambda: "unreachable:NoExecute" in machines.taints(number))
        machines.wait(250.0)
        node.start_kubelet()
        machines.until(lambda: not machines.taints(number))
    machines.wait(400.0)
    assert worker.alive
    assert "deletionTimestamp" not in machines.there(name)["metadata"]


def test_when_fewer_nodes_are_silent_their_pods_are_taken_away_after_all() -> None:
    machines = Machines()
    for node in machines.fleet.nodes.values():
        node.power_off()
    machines.wait(120.0)
    assert machines.taints(0) == ["unreachable:NoSchedule"]
    machines.node(2).power_on()
    machines.until(lambda: "unreachable:NoExecute" in machines.taints(0), 30.0)


def test_no_controller_acts_while_the_api_server_is_away() -> None:
    machines = Machines()
    name = machines.worker()
    worker = machines.runs(name)
    machines.fleet.nodes[worker.node].power_off()
    machines.wait(300.0)
    machines.api.faults.silent = True
    machines.wait(100.0)
    assert "deletionTimestamp" not in machines.there(name)["metadata"]
    machines.api.faults.silent = False
    machines.until(lambda: "deletionTimestamp" in machines.there(name)["metadata"], 2.0)


def test_pods_stay_on_a_tainted_node_for_as_long_as_they_tolerate_it() -> None:
    machines = Machines(nodes=1)
    machines.node(0).taint("example.com/repair", "NoExecute")
    toleration = {"key": "example.com/repair", "operator": "Exists"}
    short = machines.worker(0, spec={"tolerations": [{**toleration, "effect": "NoExecute", "tolerationSeconds": 60}]})
    patient = machines.worker(1, spec={"tolerations": [toleration]})
    machines.runs(patient)
    machines.runs(short)
    took = machines.until(lambda: machines.pod(short) is None, 90.0)
    assert 55.0 <= took <= 65.0
    assert machines.phase(patient) == "Running"
    machines.node(0).untaint("example.com/repair")
    machines.runs(machines.worker(2))
    machines.node(0).taint("example.com/repair", "NoExecute")
    machines.until(lambda: "deletionTimestamp" in machines.there("j-w2-0")["metadata"], 1.0)
    assert machines.phase(patient) == "Running"


def test_a_pod_bound_to_a_node_that_does_not_exist_is_collected() -> None:
    machines = Machines(nodes=1)
    name = machines.probe(7)
    machines.wait(35.0)
    assert machines.phase(name) == "Pending"
    machines.until(lambda: machines.pod(name) is None, 30.0)


def test_only_what_is_being_deleted_on_a_silent_node_out_of_service_is_taken_by_force() -> None:
    machines = Machines(nodes=1)
    key = "node.kubernetes.io/out-of-service"
    spec = {"tolerations": [{"operator": "Exists"}]}
    kept, taken = machines.worker(0, spec=spec), machines.worker(1, spec=spec)
    machines.runs(kept)
    machines.runs(taken).takes = 100.0
    machines.api.delete("pods", taken, NAMESPACE, grace=100)
    machines.node(0).taint(key, "NoExecute")
    machines.wait(5.0)
    assert machines.phase(taken) == "Running"  # the node is well
    machines.node(0).power_off()
    machines.until(lambda: machines.taints(0) != ["out-of-service:NoExecute"], 60.0)
    machines.until(lambda: machines.pod(taken) is None, 5.0)
    assert machines.phase(kept) == "Running"


def test_a_kubelet_that_restarts_goes_on_with_what_it_had_begun() -> None:
    machines = Machines(nodes=1)
    worker = machines.runs(machines.worker(0))
    starting = machines.worker(1)
    machines.until(lambda: view_pod(machines.there(starting)).node)
    machines.wait(0.31)
    machines.node(0).stop_kubelet()
    machines.wait(10.0)
    assert machines.phase(starting) == "Pending"
    machines.node(0).start_kubelet()
    machines.runs(starting)
    machines.node(0).images = Images.FAIL
    late = machines.worker(2)
    probe = machines.probe(0)
    machines.until(lambda: view_pod(machines.there(late)).waiting_reason == "ErrImagePull", 5.0)
    machines.node(0).stop_kubelet()
    machines.node(0).start_kubelet()
    machines.wait(20.0)
    machines.node(0).images = Images.COME
    machines.node(0).hang_runtime()
    worker.sidecar.pause()
    machines.until(lambda: "restart sidecar" in worker.words, 45.0)
    machines.until(lambda: machines.phase(probe) == "Failed", 130.0)
    assert machines.there(probe)["status"]["reason"] == "DeadlineExceeded"
    machines.node(0).mend_runtime()
    machines.runs(late)


def test_a_workers_address_is_free_after_a_power_failure_and_a_nodes_own_never() -> None:
    machines = Machines(nodes=1)
    own, hosts = machines.worker(0), machines.worker(1, spec={"hostNetwork": True})
    address = machines.runs(own).address
    assert machines.runs(hosts).address == machines.node(0).address
    machines.runs(hosts).end(1)
    machines.until(lambda: machines.phase(hosts) == "Failed")
    assert machines.node(0).address in machines.world.network.addresses
    machines.node(0).power_off()
    assert address not in machines.world.network.addresses


def test_two_ends_of_one_pod_are_told_as_the_first() -> None:
    machines = Machines()
    name = machines.worker()
    worker = machines.runs(name)
    machines.fleet.nodes[worker.node].evict(machines.there(name)["metadata"]["uid"])
    worker.end(0)
    machines.until(lambda: machines.phase(name) == "Failed", 5.0)
    machines.fleet.nodes[worker.node].evict(machines.there(name)["metadata"]["uid"])
    worker.exited(9, "Error")
    machines.wait(5.0)
    assert machines.terminated(name)["exitCode"] == 0  # it had ended well, and yet it was evicted
    assert machines.there(name)["status"]["reason"] == "Evicted"


def test_power_that_comes_and_goes_while_a_node_boots() -> None:
    machines = Machines(nodes=1)
    node = machines.node(0)
    node.power_off()
    node.power_on()
    machines.wait(1.0)
    node.power_off()
    machines.wait(60.0)
    assert not node.powered
    assert not machines.world.network.reaches("node-0", "api")
    node.power_on()
    machines.until(lambda: node.powered, 16.0)
    machines.runs(machines.worker())


def test_an_empty_namespace_goes() -> None:
    machines = Machines()
    machines.api.create("namespaces", {"metadata": {"name": "empty"}})
    machines.api.delete("namespaces", "empty")
    machines.until(lambda: machines.api.get("namespaces", "empty") is None, 1.0)


def test_kubelets_forget_what_is_gone() -> None:
    machines = Machines(nodes=1)
    for ordinal, grace in enumerate((None, 0)):
        name = machines.worker(ordinal)
        machines.runs(name)
        machines.api.delete("pods", name, NAMESPACE, grace=grace)
    machines.wait(30.0)
    assert not machines.node(0).kubelet._pods


def test_the_statuses_that_a_restarted_worker_writes_are_few() -> None:
    machines = Machines(nodes=1)
    name = machines.worker()
    machines.runs(name).end(1)
    machines.wait(300.0)
    writes = [change.verb for change in machines.changes if change.plural == "pods"]
    assert len(writes) <= 6  # created, bound, creating, running, exited, ended


def test_a_deleted_namespace_is_emptied_and_goes() -> None:
    machines = Machines()
    worker = machines.runs(machines.worker())
    worker.takes = 4.0
    machines.api.create("configmaps", {"metadata": {"name": "c", "namespace": NAMESPACE}})
    machines.api.patch("trainingjobs", "j", NAMESPACE, {"metadata": {"finalizers": ["pacekeeper.dev/job"]}})
    machines.api.delete("namespaces", NAMESPACE)
    machines.wait(10.0)
    assert not worker.alive
    assert not machines.api.all("pods") + machines.api.all("configmaps")
    assert machines.api.get("namespaces", NAMESPACE) is not None
    machines.api.patch("trainingjobs", "j", NAMESPACE, {"metadata": {"finalizers": None}})
    machines.until(lambda: machines.api.get("namespaces", NAMESPACE) is None, 2.0)


def test_a_terminating_pod_still_counts_in_the_quota() -> None:
    machines = Machines()
    quota = {"metadata": {"name": "q", "namespace": NAMESPACE}, "spec": {"hard": {"pods": "1"}}}
    machines.api.create("resourcequotas", quota)
    machines.wait(1.0)
    name = machines.worker()
    worker = machines.runs(name)
    worker.takes = 5.0
    machines.api.delete("pods", name, NAMESPACE)
    with pytest.raises(ApiError, match="exceeded quota"):
        machines.worker(1)
    machines.until(lambda: machines.pod(name) is None)
    machines.wait(1.0)
    machines.runs(machines.worker(1))


def test_a_run_follows_from_its_seed() -> None:
    def digest(seed: int) -> str:
        machines = Machines(seed)
        names = [machines.worker(ordinal) for ordinal in range(4)]
        machines.wait(5.0)
        machines.fleet.nodes[machines.place(names[0])].power_off()
        machines.wait(60.0)
        return machines.world.story.digest()

    assert digest(1) == digest(1)
    assert digest(1) != digest(2)
