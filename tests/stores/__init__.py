"""Object stores on this machine, and a proxy that makes them fail."""
