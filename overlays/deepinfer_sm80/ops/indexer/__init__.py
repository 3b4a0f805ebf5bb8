"""What the two indexer ops share: the score, its oracle, and inputs in the formats that they read."""

HEADS = 32
HEAD_DIM = 128
# 128 e4m3 codes and one float32 scale per state
RECORD_BYTES = 132
