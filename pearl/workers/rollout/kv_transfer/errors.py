"""Why a handing over failed. Expected: it ends that one attempt, which another pair may take up."""


class KvTransferError(Exception):
    """KV did not get from one worker to the other; the message says what was seen."""
