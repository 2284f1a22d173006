"""Python as it is on a system without Linux's extras, in every process that finds this file."""

import os
import select
import socket

EXTRAS = {
    os: ("memfd_create", "MFD_CLOEXEC", "pidfd_open", "posix_fallocate"),
    select: ("epoll",),
    socket: ("SO_PEERCRED", "MSG_CMSG_CLOEXEC", "TCP_INFO"),
}
for module, names in EXTRAS.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
