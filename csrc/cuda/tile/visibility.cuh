// Which keys a query may see by the causal, window and length rules: always one interval, whose ends grow with the
// query. Host and device; the planner balances tiles with it.
#pragma once

#include "../../attention_params.h"

namespace attn_ext::cuda {

struct KeyRange {
  int begin, end;  // [begin, end), empty ranges are [0, 0)
};

// The rules of one batch element. Sequence lengths are below 2^31.
struct Visibility {
  int keys, queries;                // valid lengths
  int64_t reach_left, reach_right;  // query i sees keys i + reach_left .. i + reach_right, both included

  ATTN_HOST_DEVICE Visibility(const AttentionParams& p, int64_t b)
      : keys(int(p.valid_keys(b))), queries(int(p.valid_queries(b))) {
    const int64_t open = p.len_q + p.len_k, offset = p.offset();  // a reach of `open` hides nothing
    const int64_t left = p.window_left < 0 || p.window_left > open ? open : p.window_left;
    int64_t right = p.window_right < 0 || p.window_right > open ? open : p.window_right;
    if (p.causal != Causal::kNone) right = 0;
    reach_left = offset - left;
    reach_right = offset + right;
  }

  // Keys that query i sees.
  ATTN_HOST_DEVICE KeyRange of_query(int i) const { return of_queries(i, i); }

  // The smallest interval that holds all keys that queries first .. last see.
  ATTN_HOST_DEVICE KeyRange of_queries(int first, int last) const {
    if (last > queries - 1) last = queries - 1;
    if (first > last) return {0, 0};
    const int64_t begin = first + reach_left < 0 ? 0 : first + reach_left;
    const int64_t end = last + reach_right + 1 > keys ? keys : last + reach_right + 1;
    return end > begin ? KeyRange{int(begin), int(end)} : KeyRange{0, 0};
  }

  // The keys that each of the queries first .. last sees, so that a tile inside needs no mask. Queries that do not
  // exist see nothing, but their rows are never stored: they do not count.
  ATTN_HOST_DEVICE KeyRange of_all_queries(int first, int last) const {
    if (last > queries - 1) last = queries - 1;
    if (first > last) return {0, 0};
    const int64_t begin = last + reach_left < 0 ? 0 : last + reach_left;
    const int64_t end = first + reach_right + 1 > keys ? keys : first + reach_right + 1;
    return end > begin ? KeyRange{int(begin), int(end)} : KeyRange{0, 0};
  }

  // The queries that see at least one of the keys first .. last: [begin, end).
  ATTN_HOST_DEVICE KeyRange queries_of_keys(int first, int last) const {
    if (last > keys - 1) last = keys - 1;
    if (first > last) return {0, 0};
    const int64_t begin = first - reach_right < 0 ? 0 : first - reach_right;
    const int64_t end = last - reach_left + 1 > queries ? queries : last - reach_left + 1;
    return end > begin ? KeyRange{int(begin), int(end)} : KeyRange{0, 0};
  }

  // The queries that see every one of the keys first .. last.
  ATTN_HOST_DEVICE KeyRange queries_of_all_keys(int first, int last) const {
    if (last > keys - 1) return {0, 0};
    const int64_t begin = last - reach_right < 0 ? 0 : last - reach_right;
    const int64_t end = first - reach_left + 1 > queries ? queries : first - reach_left + 1;
    return end > begin ? KeyRange{int(begin), int(end)} : KeyRange{0, 0};
  }
};

// Tiles first .. last hold the keys that queries row .. row + rows - 1 see; whole_first .. whole_last of them need
// no mask.
struct KeyTiles {
  int first, last, whole_first, whole_last;

  ATTN_HOST_DEVICE KeyTiles(const Visibility& visible, int row, int rows, int keys) {
    const KeyRange any = visible.of_queries(row, row + rows - 1),
                   all = visible.of_all_queries(row, row + rows - 1);
    first = any.begin / keys;
    last = (any.end + keys - 1) / keys - 1;
    whole_first = (all.begin + keys - 1) / keys;
    whole_last = all.end / keys - 1;
  }
};

}  // namespace attn_ext::cuda
