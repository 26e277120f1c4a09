// The gated delta rule, token by token: one token a row against the state of its slot, or sequences from theirs.
//
// The ladder:
// 1. gdn_any: eight lanes a row of the state, of any length and alignment, read twice.
// 2. gdn_rows: rows of 128 elements wait in registers between their two sums, so a state is read and written once; 16
//    bytes an access, all loads of a row under way together, a row for each eight threads. Two, four or eight rows a
//    thread were 1, 2 and 5 % slower for 64 states of 48 heads, and 3, 12 and 30 % for one.
// 3. gdn_narrow: the same for states of 16 bits, two rows a thread.
// 4. gdn_tokens: rows stay in registers along a sequence; the next token's operands are sent for a token ahead.
#include "delta.cuh"

RULE_ANY(gdn_any, false)
RULE_TILE(gdn_rows, 1, 6, F32, false, true)
RULE_TILE(gdn_narrow, 2, 5, BF16, false, true)
RULE_TILE(gdn_tokens, 2, 4, F32, false, false)
