// Gated delta nets' training kernels one after the other, against the recurrence in float64: outputs, last states, and gradients. A
// gradient is held to the growth of the loss along it, and along it with random signs.
#include "device.h"

namespace rule {
#include "delta_rule.inc"
}
namespace gradients {
#include "delta_gradients.inc"
}
namespace mix {
#include "delta_mix.inc"
}

using Values = std::vector<double>;
using Halves = std::vector<bf16>;
using Floats = std::vector<float>;
constexpr int DIM = 128, TAPS = 4, KEY_HEADS = 1, STATE = DIM * DIM;

struct Inputs { Values x, z, a, b, conv, a_log, dt_bias, norm, tails, initial; };
struct Shape {
    int heads;
    std::vector<int> lengths;
    int channels() const { return (2 * KEY_HEADS + heads) * DIM; }
};
struct Seeds { Values d_y, d_last; };  // of the loss: sum(d_y y) + sum(d_last last)

static std::mt19937 numbers(11);
Halves halves(size_t count, double scale = 1.0, double mean = 0.0) {
    std::normal_distribution<double> normal(mean, scale);
    Halves values(count);
    for (bf16& value : values) narrow(float(normal(numbers)), value);
    return values;
}
Values wide(const Halves& values) {
    Values out;
    for (bf16 value : values) out.push_back(widen(value));
    return out;
}
Values wide(const Floats& values) { return Values(values.begin(), values.end()); }
double silu(double x) { return x / (1 + std::exp(-x)); }

// Queries, keys and values of a sequence behind its convolution, queries and keys of unit length.
Values mixed(const Inputs& in, const Shape& shape, int n, int first) {
    const int channels = shape.channels();
    Values out(size_t(shape.lengths[n]) * channels);
    for (int t = 0; t < shape.lengths[n]; ++t) {
        double* row = &out[size_t(t) * channels];
        for (int c = 0; c < channels; ++c) {
            double sum = 0;
            for (int tap = 0; tap < TAPS; ++tap) {
                const int at = t - (TAPS - 1) + tap;
                const double x = at >= 0 ? in.x[size_t(first + at) * channels + c] : in.tails[(size_t(n) * 3 + 3 + at) * channels + c];
                sum += x * in.conv[c * TAPS + tap];
            }
            row[c] = silu(sum);
        }
        for (int head = 0; head < 2 * KEY_HEADS; ++head) {
            double squares = 1e-6;
            for (int c = 0; c < DIM; ++c) squares += row[head * DIM + c] * row[head * DIM + c];
            for (int c = 0; c < DIM; ++c) row[head * DIM + c] /= std::sqrt(squares);
        }
    }
    return out;
}

// The loss by the recurrence, token by token; y and last where they are asked for.
double loss(const Inputs& in, const Shape& shape, const Seeds& seeds, Values* y = nullptr, Values* last = nullptr) {
    double sum = 0;
    int first = 0;
    for (size_t n = 0; n < shape.lengths.size(); ++n) {
        const Values rows = mixed(in, shape, int(n), first);
        for (int head = 0; head < shape.heads; ++head) {
            const size_t whole = (n * shape.heads + head) * STATE;
            Values state(in.initial.begin() + whole, in.initial.begin() + whole + STATE);
            for (int t = 0; t < shape.lengths[n]; ++t) {
                const double* q = &rows[size_t(t) * shape.channels() + head / (shape.heads / KEY_HEADS) * DIM];
                const double *k = q + KEY_HEADS * DIM, *v = &rows[size_t(t) * shape.channels() + (2 * KEY_HEADS + head) * DIM];
                const size_t at = size_t(first + t) * shape.heads + head;
                const double decay = std::exp(-std::exp(in.a_log[head]) * std::log1p(std::exp(in.a[at] + in.dt_bias[head])));
                const double strength = 1 / (1 + std::exp(-in.b[at]));
                Values fresh(DIM), out(DIM);
                for (int i = 0; i < STATE; ++i) state[i] *= decay, fresh[i % DIM] += k[i / DIM] * state[i];
                for (int j = 0; j < DIM; ++j) fresh[j] = strength * (v[j] - fresh[j]);
                for (int i = 0; i < STATE; ++i) state[i] += k[i / DIM] * fresh[i % DIM], out[i % DIM] += q[i / DIM] * state[i];
                double squares = 0;
                for (double& o : out) o /= std::sqrt(double(DIM)), squares += o * o;
                for (int j = 0; j < DIM; ++j) {
                    const double own = out[j] / std::sqrt(squares / DIM + 1e-6) * in.norm[j] * silu(in.z[at * DIM + j]);
                    sum += own * seeds.d_y[at * DIM + j];
                    if (y) (*y)[at * DIM + j] = own;
                }
            }
            for (int i = 0; i < STATE; ++i) sum += state[i] * seeds.d_last[whole + i];
            if (last) std::copy(state.begin(), state.end(), last->begin() + whole);
        }
        first += shape.lengths[n];
    }
    return sum;
}

static bool all_hold = true;
void hold(const char* what, double error, double bound) {
    const bool holds = error < bound;  // not where it is no number
    printf("  %-24s %.1e%s\n", what, error, holds ? "" : "  TOO FAR");
    all_hold &= holds;
}
void hold_to(const char* what, const Values& got, const Values& expected) {
    double off = 0, all = 0;
    for (size_t i = 0; i < expected.size(); ++i) off += std::pow(got[i] - expected[i], 2), all += expected[i] * expected[i];
    hold(what, std::sqrt(off / all), 1e-2);
}

// The sums over rows of partial sums.
Values columns(const Floats& partial, size_t count, size_t first = 0, size_t rows = 0) {
    Values sums(count);
    for (size_t row = 0; row < (rows ? rows : partial.size() / count); ++row)
        for (size_t i = 0; i < count; ++i) sums[i] += partial[first + row * count + i];
    return sums;
}

void check(const Shape& shape, int warps) {
    const int heads = shape.heads, channels = shape.channels(), count = int(shape.lengths.size());
    std::vector<rule::Chunk> chunks;
    std::vector<rule::Sequence> sequences;
    int tokens = 0;
    for (int n = 0; n < count; ++n) {
        const int begin = int(chunks.size()), length = shape.lengths[n];
        for (int at = 0; at < length; at += 64) chunks.push_back({tokens + at, min(length - at, 64), n, at});
        sequences.push_back({n, begin, int(chunks.size()) - begin, length});
        tokens += length;
    }
    std::stable_sort(sequences.begin(), sequences.end(), [](const auto& a, const auto& b) { return a.chunks > b.chunks; });
    const size_t rows = size_t(tokens) * heads, items = chunks.size() * heads, teams = chunks.size() * channels / DIM;
    const Halves x = halves(size_t(tokens) * channels), z = halves(rows * DIM), a = halves(rows), b = halves(rows);
    const Halves conv = halves(channels * TAPS, 0.5), a_log = halves(heads), dt_bias = halves(heads), norm = halves(DIM, 0.1, 1.0);
    const Halves tails = halves(size_t(count) * 3 * channels), d_y = halves(rows * DIM), states = halves(size_t(count) * heads * STATE, 0.3);
    const Halves d_states = halves(states.size(), 0.3);
    Floats initial, d_last;
    for (bf16 value : states) initial.push_back(widen(value));
    for (bf16 value : d_states) d_last.push_back(widen(value));
    const bf16 none = {0x7fff};
    const Halves of_tokens(size_t(tokens) * channels, none), of_rows(rows * DIM, none), of_items(items * 64 * DIM, none);
    Halves rule_in = of_tokens, u = of_items, w = of_items, news = of_items, solved = of_items, p(items * 64 * 64, none), t = p, before(items * STATE, none);
    Halves behind = before, o = of_rows, y = of_rows, d_o = of_rows, d_z = of_rows, d_in = of_tokens, d_x = of_tokens, d_a(rows, none), d_b = d_a;
    std::vector<rule::Gates> gates(items);
    constexpr int NORM_BLOCKS = 3;
    Floats last(initial.size(), NAN), d_initial = last, of_heads(2 * items, NAN), d_tails(tails.size()), d_conv(chunks.size() * channels * TAPS, NAN);
    Floats d_norm(NORM_BLOCKS * DIM, NAN);

    const int mix_blocks = int(teams * 32 + 127) / 128, passes = count * heads * 8 / warps, row_count = int(rows);
    const auto as = [](auto* to, auto& from) { return reinterpret_cast<decltype(to)>(from.data()); };
    launch(mix_blocks, 128, [&] {
        mix::delta_mix(x.data(), conv.data(), tails.data(), as((mix::Chunk*)0, chunks), rule_in.data(), channels, 2 * KEY_HEADS, teams);
    });
    launch(int(items), 128, [&] {
        rule::delta_prepare(rule_in.data(), a.data(), b.data(), a_log.data(), dt_bias.data(), chunks.data(), u.data(), w.data(), p.data(), t.data(),
                            gates.data(), heads, KEY_HEADS, channels);
    });
    launch(passes, 32 * warps, [&] {
        (warps == 8 ? rule::delta_scan_8 : rule::delta_scan_4)(
            rule_in.data(), u.data(), w.data(), p.data(), gates.data(), chunks.data(), sequences.data(), initial.data(), o.data(), last.data(),
            before.data(), news.data(), heads, KEY_HEADS, channels);
    });
    launch(NORM_BLOCKS, 256, [&] { mix::delta_norm(o.data(), z.data(), norm.data(), y.data(), row_count, 1e-6f); });
    launch(NORM_BLOCKS, 256, [&] {
        mix::delta_norm_backward(d_y.data(), o.data(), z.data(), norm.data(), d_o.data(), d_z.data(), d_norm.data(), row_count, 1e-6f);
    });
    launch(passes, 32 * warps, [&] {
        (warps == 8 ? gradients::delta_reverse_8 : gradients::delta_reverse_4)(
            rule_in.data(), w.data(), p.data(), t.data(), d_o.data(), as((gradients::Gates*)0, gates), as((gradients::Chunk*)0, chunks),
            as((gradients::Sequence*)0, sequences), d_last.data(), behind.data(), solved.data(), d_initial.data(), heads, KEY_HEADS, channels);
    });
    const int pairs = int(chunks.size()) * KEY_HEADS;
    launch(min(2, pairs), 512, [&] {
        gradients::delta_gradients(
            rule_in.data(), d_o.data(), before.data(), news.data(), behind.data(), solved.data(), a.data(), a_log.data(), dt_bias.data(),
            as((gradients::Gates*)0, gates), as((gradients::Chunk*)0, chunks), d_in.data(), d_a.data(), d_b.data(), of_heads.data(), heads, KEY_HEADS,
            channels, pairs);
    });
    launch(mix_blocks, 128, [&] {
        mix::delta_mix_backward(x.data(), conv.data(), tails.data(), as((mix::Chunk*)0, chunks), shape.lengths.data(), d_in.data(), d_x.data(),
                                d_tails.data(), d_conv.data(), channels, 2 * KEY_HEADS, teams);
    });

    const Inputs in = {wide(x), wide(z), wide(a), wide(b), wide(conv), wide(a_log), wide(dt_bias), wide(norm), wide(tails), wide(initial)};
    const Seeds seeds = {wide(d_y), wide(d_last)};
    Values expected_y(y.size()), expected_last(last.size());
    loss(in, shape, seeds, &expected_y, &expected_last);
    hold_to("outputs", wide(y), expected_y);
    hold_to("last states", wide(last), expected_last);
    struct Gradient { const char* name; Values values; Values Inputs::*input; };
    for (const Gradient& gradient : std::vector<Gradient>{
             {"queries, keys, values", wide(d_x), &Inputs::x}, {"z", wide(d_z), &Inputs::z}, {"a", wide(d_a), &Inputs::a}, {"b", wide(d_b), &Inputs::b},
             {"convolution", columns(d_conv, channels * TAPS), &Inputs::conv}, {"A_log", columns(of_heads, heads, 0, chunks.size()), &Inputs::a_log},
             {"dt_bias", columns(of_heads, heads, items, chunks.size()), &Inputs::dt_bias}, {"norm", columns(d_norm, DIM), &Inputs::norm},
             {"tails", wide(d_tails), &Inputs::tails}, {"initial states", wide(d_initial), &Inputs::initial}}) {
        double worst = 0, squares = 0;
        for (double value : gradient.values) squares += value * value;
        for (int signs = 0; signs < 2; ++signs) {
            double grown[2], expected = 0;
            Values way = gradient.values;
            for (size_t i = 0; i < way.size(); ++i) way[i] *= signs && numbers() % 2 ? -1 : 1, expected += way[i] * gradient.values[i];
            const double step = 1e-4 / std::sqrt(squares);
            for (int side = 0; side < 2; ++side) {
                Inputs moved = in;
                for (size_t i = 0; i < way.size(); ++i) (moved.*gradient.input)[i] += (side ? -step : step) * way[i];
                grown[side] = loss(moved, shape, seeds);
            }
            const double off = std::abs((grown[0] - grown[1]) / (2 * step) - expected) / squares;
            worst = off <= worst ? worst : off;
        }
        hold(gradient.name, worst, 2e-2);
    }
}

int main() {
    for (const bool early : {false, true})
        for (const int warps : {8, 4}) {
            copies_are_early = early;
            const Shape shape = {early ? 3 : 2, {70, 1, 64, 3}};
            printf("%d value heads, %d warps, copies arrive %s\n", shape.heads, warps, early ? "at once" : "when they are waited for");
            check(shape, warps);
        }
    hold("races", double(races), 0.5);
    return all_hold ? 0 : 1;
}
