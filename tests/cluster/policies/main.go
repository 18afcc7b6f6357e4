// Command network-policies is kube-network-policies with a kubeconfig. Its own command only accepts a pod's service account.
package main

import (
	"context"
	"flag"
	"os/signal"
	"syscall"

	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
	"sigs.k8s.io/kube-network-policies/pkg/networkpolicy"
)

func main() {
	kubeconfig := flag.String("kubeconfig", "", "file with the API server's address and the credentials")
	node := flag.String("node", "", "name of this Kubernetes node")
	queue := flag.Int("queue", 100, "number of the NFQUEUE from which packets are read")
	flag.Parse()
	ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer cancel()
	config, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
	if err != nil {
		klog.Fatal(err)
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		klog.Fatal(err)
	}
	factory := informers.NewSharedInformerFactory(client, 0)
	policies, namespaces, pods := factory.Networking().V1().NetworkPolicies(), factory.Core().V1().Namespaces(), factory.Core().V1().Pods()
	settings := networkpolicy.Config{NodeName: *node, QueueID: *queue}
	controller, err := networkpolicy.NewController(client, policies, namespaces, pods, nil, nil, nil, nil, settings)
	if err != nil {
		klog.Fatal(err)
	}
	factory.Start(ctx.Done())
	if err := controller.Run(ctx); err != nil {
		klog.Fatal(err)
	}
}
