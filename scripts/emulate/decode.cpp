// One token of several sequences by `delta_decode`, with the bits of `delta_step`, whose results are held to the rule in float64.
#include "device.h"

namespace step {
#include "delta_step.inc"
}
namespace decode {
#include "delta_decode.inc"
}

constexpr int DIM = 128, WIDTH = 4, STATE = DIM * DIM;
constexpr float EPS = 1e-6f;

static std::mt19937 numbers(7);
static bool all_hold = true;

template <typename T>
std::vector<T> random_values(size_t count, double scale = 1.0) {
    std::normal_distribution<double> normal(0.0, scale);
    std::vector<T> values(count);
    for (T& value : values) narrow(float(normal(numbers)), value);
    return values;
}
template <typename T>
std::vector<T> poison(size_t count) { std::vector<T> values(count); memset(values.data(), 0xff, count * sizeof(T)); return values; }
template <typename T>
bool has_same_bits(const std::vector<T>& a, const std::vector<T>& b) { return memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0; }
void hold(bool holds, const char* what) {
    if (!holds) printf("  %s: WRONG\n", what);
    all_hold &= holds;
}
double silu(double x) { return x / (1 + std::exp(-x)); }

struct Shape {
    int key_heads, heads, tokens, blocks;
    int channels() const { return (2 * key_heads + heads) * DIM; }
};
template <typename S>
struct Pages {
    std::vector<bf16> tails;  // [pages, slots, C]
    std::vector<S> states;    // [pages, H, DIM, DIM]
    std::vector<bf16> out;    // [T, H DIM]
};

// How far outputs and states are from float64, relative to the largest of them.
template <typename S>
void hold_to_rule(const Shape& shape, int slots, const Pages<S>& before, const Pages<S>& after, const std::vector<bf16>& rows, int row,
                  const std::vector<bf16>& conv, const std::vector<bf16>& of_heads, const std::vector<bf16>& norm,
                  const std::vector<int>& pages, const std::vector<int>& positions) {
    const int channels = shape.channels();
    double off_out = 0, off_state = 0;
    for (int t = 0; t < shape.tokens; ++t)
        for (int head = 0; head < shape.heads; ++head) {
            const bf16 *own = &rows[size_t(t) * row], *z = own + channels + head * DIM, *b = own + channels + shape.heads * DIM, *a = b + shape.heads;
            const bf16* out = &after.out[(size_t(t) * shape.heads + head) * DIM];
            if (pages[t] < 0) {
                for (int j = 0; j < DIM; ++j) hold(out[j].bits == 0, "the output of no sequence");
                continue;
            }
            const int start = positions[t], key_head = head / (shape.heads / shape.key_heads);
            double mixed[3][DIM], lengths[2] = {1e-6, 1e-6};
            for (int kind = 0; kind < 3; ++kind)
                for (int i = 0; i < DIM; ++i) {
                    const int channel = (kind == 2 ? 2 * shape.key_heads + head : kind * shape.key_heads + key_head) * DIM + i;
                    double y = 0;
                    for (int d = 0; d < WIDTH && d <= start; ++d) {
                        const bf16 x = d == 0 ? own[channel] : before.tails[(size_t(pages[t]) * slots + (start - d) % slots) * channels + channel];
                        y += double(widen(x)) * widen(conv[channel * WIDTH + WIDTH - 1 - d]);
                    }
                    mixed[kind][i] = silu(y);
                    if (kind < 2) lengths[kind] += mixed[kind][i] * mixed[kind][i];
                }
            const double rate = std::exp(widen(of_heads[head])), bias = widen(of_heads[shape.heads + head]);
            const double decay = std::exp(-rate * std::log1p(std::exp(widen(a[head]) + bias))), strength = 1 / (1 + std::exp(-widen(b[head])));
            const size_t whole = (size_t(pages[t]) * shape.heads + head) * STATE;
            std::vector<double> state(STATE);
            for (int i = 0; i < STATE; ++i) state[i] = start > 0 ? decay * widen(before.states[whole + i]) : 0;
            double fresh[DIM] = {}, o[DIM] = {}, squares = 0;
            for (int i = 0; i < STATE; ++i) fresh[i % DIM] += mixed[1][i / DIM] / std::sqrt(lengths[1]) * state[i];
            for (int j = 0; j < DIM; ++j) fresh[j] = strength * (mixed[2][j] - fresh[j]);
            for (int i = 0; i < STATE; ++i) {
                state[i] += mixed[1][i / DIM] / std::sqrt(lengths[1]) * fresh[i % DIM];
                o[i % DIM] += mixed[0][i / DIM] / std::sqrt(lengths[0] * DIM) * state[i];
                off_state = std::max(off_state, std::abs(state[i] - widen(after.states[whole + i])));
            }
            for (double value : o) squares += value * value;
            for (int j = 0; j < DIM; ++j) {
                const double expected = o[j] / std::sqrt(squares / DIM + EPS) * widen(norm[j]) * silu(widen(z[j]));
                off_out = std::max(off_out, std::abs(expected - widen(out[j])) / std::max(1.0, std::abs(expected)));
            }
        }
    printf("  off by %.1e of outputs, %.1e of states\n", off_out, off_state);
    hold(off_out < 1e-2 && off_state < (sizeof(S) == 2 ? 2e-2 : 1e-5), "the rule in float64");
}

template <typename S>
void check(const Shape& shape, int slots, void (*by_step)(const bf16*, const bf16*, const bf16*, const bf16*, long long, long long, long long, long long,
                                               const bf16*, const bf16*, const bf16*, const bf16*, bf16*, S*, const int*, const int*, bf16*,
                                               long long, long long, long long, long long, long long, float, long long, long long),
           decltype(by_step) by_decode) {
    const int channels = shape.channels(), heads = shape.heads, tokens = shape.tokens, num_pages = tokens + 2;
    const int row = (channels + heads * DIM + 2 * heads + 7) / 8 * 8 + 8;
    const auto rows = random_values<bf16>(size_t(tokens) * row), conv = random_values<bf16>(channels * WIDTH, 0.5);
    const auto of_heads = random_values<bf16>(2 * heads), norm = random_values<bf16>(DIM);
    std::vector<int> pages(num_pages), positions(tokens);
    for (int page = 0; page < num_pages; ++page) pages[page] = page;
    std::shuffle(pages.begin(), pages.end(), numbers);
    if (tokens > 2) pages[1] = -1;
    for (int t = 0; t < tokens; ++t) positions[t] = t % 3 == 2 ? 0 : 1 + t % 7;
    Pages<S> before = {poison<bf16>(size_t(num_pages) * slots * channels), poison<S>(size_t(num_pages) * heads * STATE),
                       poison<bf16>(size_t(tokens) * heads * DIM)};
    for (int t = 0; t < tokens; ++t) {
        if (pages[t] < 0 || positions[t] == 0) continue;  // what lies there is not read
        const auto state = random_values<S>(size_t(heads) * STATE, 0.3);
        std::copy(state.begin(), state.end(), &before.states[size_t(pages[t]) * heads * STATE]);
        for (int d = 1; d < WIDTH && d <= positions[t]; ++d) {
            const auto tail = random_values<bf16>(channels);
            std::copy(tail.begin(), tail.end(), &before.tails[(size_t(pages[t]) * slots + (positions[t] - d) % slots) * channels]);
        }
    }
    const auto run = [&](auto kernel, int threads) {
        Pages<S> own = before;
        launch(min(shape.blocks, tokens * heads), threads, [&] {
            const bf16 *z = rows.data() + channels, *b = z + heads * DIM;
            kernel(rows.data(), z, b, b + heads, row, row, row, row, conv.data(), of_heads.data(), of_heads.data() + heads, norm.data(),
                   own.tails.data(), own.states.data(), pages.data(), positions.data(), own.out.data(), shape.key_heads, heads, DIM, DIM, WIDTH,
                   EPS, slots, tokens);
        });
        return own;
    };
    const Pages<S> expected = run(by_step, 256);
    hold_to_rule(shape, slots, before, expected, rows, row, conv, of_heads, norm, pages, positions);
    for (int repeat = 0; repeat < 4; ++repeat) {  // each in another order of warps
        const Pages<S> got = run(by_decode, 160);
        hold(has_same_bits(got.out, expected.out), "bits of outputs");
        hold(has_same_bits(got.states, expected.states), "bits of states");
        hold(has_same_bits(got.tails, expected.tails), "bits of the convolution's rows");
    }
}

int main() {
    for (const bool early : {false, true})
        for (const Shape& shape : {Shape{1, 1, 1, 8}, Shape{2, 2, 3, 2}, Shape{1, 3, 4, 5}, Shape{2, 4, 6, 3}}) {
            copies_are_early = early;
            printf("%d key heads, %d value heads, %d sequences, copies arrive %s\n", shape.key_heads, shape.heads, shape.tokens,
                   early ? "at once" : "when they are waited for");
            for (const int slots : {WIDTH, WIDTH + 6}) {  // without draft tokens, and with up to three
                check<float>(shape, slots, step::delta_step_bf16_f32_128, decode::delta_decode_f32);
                check<bf16>(shape, slots, step::delta_step_bf16_bf16_128, decode::delta_decode_bf16);
            }
        }
    printf("  races %llu\n", races);
    return all_hold && races == 0 ? 0 : 1;
}
