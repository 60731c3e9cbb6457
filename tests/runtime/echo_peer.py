"""A peer in a process of its own: counts the orders it was told and answers with the count."""

import asyncio
import os
import sys

from rpc_messages import Answer, Order, make_peer


def main(address: str, incarnation: int) -> None:
    told: list[int] = []

    async def handle(order: Order) -> Answer | None:
        if order.number >= 0:
            told.append(order.number)
            return None
        whole = told == list(range(len(told)))
        return Answer(len(told) if whole else -1)

    peer = make_peer(address, handle, incarnation=incarnation, pid=os.getpid(), queue_messages=64)
    asyncio.run(peer.run())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
