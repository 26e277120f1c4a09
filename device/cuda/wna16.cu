// Codes a word and codes packed along K or N, both ways: codes.cuh.
#include "codes.cuh"

MOVE_CODES(wna16_codes)
