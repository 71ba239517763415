"""Is a service ready? `python -m services.probe HOST:PORT` exits 0 where it says SERVING, else 1 and says why.

Made for health checks of containers and schedulers: it needs nothing but gRPC and always ends within its deadline.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.channel import call, connect
from services.errors import PeerError


def main() -> int:
    """Read the flags, ask, print one line."""
    parser = argparse.ArgumentParser(prog="python -m services.probe", description="Ask a service for its health.")
    parser.add_argument("address", help="HOST:PORT")
    parser.add_argument("--service", default="", help="empty: ready for work; liveness: its loop turns")
    parser.add_argument("--deadline-seconds", type=float, default=3.0)
    flags = parser.parse_args()
    state = asyncio.run(probe(flags.address, service=flags.service, deadline_seconds=flags.deadline_seconds))
    print(state)
    return 0 if state == "SERVING" else 1


async def probe(address: str, *, service: str = "", deadline_seconds: float = 3.0) -> str:
    """SERVING, NOT_SERVING, SERVICE_UNKNOWN, or why there was no answer."""
    channel = connect(address)
    try:
        request = health_pb2.HealthCheckRequest(service=service)
        check = health_pb2_grpc.HealthStub(channel).Check  # type: ignore[attr-defined]  # its types leave it out
        reply = await call(check, request, deadline_seconds=deadline_seconds, what=f"health of {address}")
    except PeerError as error:
        return str(error)
    finally:
        await channel.close()
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))


if __name__ == "__main__":
    sys.exit(main())
