"""A real Kubernetes on one Linux machine, for development and tests: `python -m testcluster up`.

None of it is a mock. etcd, API server, scheduler, and controllers run on the machine. Every worker node has its own
kubelet, kube-proxy, containerd, and network namespace, so that a node can really be lost and a link really be slow.
"""
