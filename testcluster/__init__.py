"""A real Kubernetes on one Linux machine, for development and tests: `python -m testcluster up`.

Nothing of it is a mock: etcd, API server, scheduler and controllers run on the machine, and every worker node has a
kubelet, a kube-proxy, a containerd and a network namespace of its own, so that a node can be lost and a link slowed for
real.
"""
