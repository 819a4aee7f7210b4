"""Every test of the driver runs on the backend that its programs would choose."""

from expert_network import backend

backend.detect()
