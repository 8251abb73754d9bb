"""Several serving processes on one port: `role` is a process's part in it, `supervisor` starts and watches them,
`front` answers for all of them on the admin listener."""
