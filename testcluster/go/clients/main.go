// kubectl and Helm in one binary, which is the one whose name it is called by: they share most of their code.
package main

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"

	helm "helm.sh/helm/v4/pkg/cmd"
	"helm.sh/helm/v4/pkg/kube"
	_ "k8s.io/client-go/plugin/pkg/client/auth"
	"k8s.io/component-base/cli"
	"k8s.io/component-base/logs"
	kubectl "k8s.io/kubectl/pkg/cmd"
	"k8s.io/kubectl/pkg/cmd/util"
)

func main() {
	switch name := filepath.Base(os.Args[0]); name {
	case "kubectl":
		runKubectl()
	case "helm":
		runHelm()
	default:
		fmt.Fprintf(os.Stderr, "%s: call this program kubectl or helm, through a link\n", name)
		os.Exit(2)
	}
}

func runKubectl() {
	logs.GlogSetter(kubectl.GetLogVerbosity(os.Args))
	if err := cli.RunNoErrOutput(kubectl.NewDefaultKubectlCommand()); err != nil {
		util.CheckErr(err)
	}
}

func runHelm() {
	kube.ManagedFieldsManager = "helm" // of fields that it writes, by whatever path it was called
	command, err := helm.NewRootCmd(os.Stdout, os.Args[1:], helm.SetupLogging)
	if err != nil {
		slog.Warn("command failed", slog.Any("error", err))
		os.Exit(1)
	}
	if err := command.Execute(); err != nil {
		var failed helm.CommandError
		if errors.As(err, &failed) {
			os.Exit(failed.ExitCode)
		}
		os.Exit(1)
	}
}
