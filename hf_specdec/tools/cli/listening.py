"""The address that a command listens on, bound before a model is loaded."""

import errno
import socket

from hf_specdec.errors import ConfigError


def listen(host: str, port: int) -> socket.socket:
    """Open a socket at an address.

    Args:
        port: 0 is any that is free.

    Raises:
        ConfigError: there is no such address, or another program has the port.
    """
    try:
        known = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, _, _, _, address = min(known, key=lambda one: one[0] != socket.AF_INET)  # of localhost 127.0.0.1
        return socket.create_server(address, family=family)
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            remedy = f"{error.strerror}. Choose another port."
            raise ConfigError("--port", "must be a port that can be listened on", port, remedy) from error
        remedy = f"{error.strerror}. 127.0.0.1 is this machine alone."
        raise ConfigError("--host", "must be an address of this machine", host, remedy) from error
