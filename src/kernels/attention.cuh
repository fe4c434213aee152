// What plan_attention.cu writes and paged_attention.cu reads.
#pragma once

constexpr int WARPS = 4;
constexpr int UNIT = 16;    // tokens of one product
constexpr int MEMBERS = 2;  // rows that a warp has of a shared part
constexpr int PARTY = WARPS * MEMBERS;
constexpr int UNITS = 2;    // units that a warp has at once of an own part

// Tokens begin .. end of the rows' contexts.
struct alignas(16) Item {
    int rows[PARTY];  // of a shared part, -1: none; of an own part the row and its `Pieces`
    int begin, end;
    int piece;  // place among the partial results of a row
    int is_shared;
};

// Written by plan_attention; `next` and `done` are the takers' and back at 0 after every layer.
struct Header {
    int num_items, next, done, reserved;
};

// Where the partial results of a row stand.
struct Pieces {
    int first, count;
};
