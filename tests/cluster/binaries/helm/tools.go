//go:build tools

// Package helm pins the Helm client that installs the chart in the tests.
package helm

import _ "helm.sh/helm/v4/cmd/helm"
