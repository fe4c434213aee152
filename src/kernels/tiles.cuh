// Tiles of rows of one expert.
#pragma once

// Rows first .. first + count of the sorted choices, all of one expert.
struct alignas(16) Tile {
    int expert, first, count, reserved;
};
