"""The process group, devices, and the store through which ranks find each other."""
