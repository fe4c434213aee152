// Data structures that plan_attention.cu writes and paged_attention.cu reads.
#pragma once

constexpr int WARPS = 4;
constexpr int UNIT = 16;    // tokens per multiplication
constexpr int MEMBERS = 2;  // rows per warp in a shared part
constexpr int PARTY = WARPS * MEMBERS;
constexpr int UNITS = 2;    // units that a warp processes at once in an own part

// A work item: tokens begin .. end of the contexts of some rows.
struct alignas(16) Item {
    int rows[PARTY];  // of a shared part, -1: none; of an own part its row, its `Pieces`, and how many of them it is
    int begin, end;
    int piece;  // index of the first among the partial results of a row
    int is_shared;
};

// Written by plan_attention; `next` and `done` are used by the blocks that take items, and are reset to 0 after every layer.
struct Header {
    int num_items, next, done, reserved;
};

// Position of a row's partial results.
struct Pieces {
    int first, count;
};
