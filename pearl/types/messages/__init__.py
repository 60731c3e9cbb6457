"""Wire messages between the coordinator and its peers: tagged, typed, refused when malformed.

``X`` / ``XReply`` pairs are asked (an answer or an error before a deadline); the rest are told.
"""
