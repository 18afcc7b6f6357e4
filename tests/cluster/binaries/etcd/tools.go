//go:build tools

// Package etcd pins the store of the test cluster.
package etcd

import _ "go.etcd.io/etcd/server/v3"
