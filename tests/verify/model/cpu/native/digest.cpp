// Prints a digest of the bits of products, for each kind of weights, and of attention, for each kind of cache, of seeded inputs.
// Compiled for each kind of CPU and run under emulation, it must print the same lines: arguments are seeds.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>
#ifdef __AMX_TILE__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "../../../../../verify/model/cpu/native/attention.h"
#include "../../../../../verify/model/cpu/native/stored.h"
#include "../../../../../verify/model/cpu/native/multiply.h"

using namespace outrider;

namespace {

struct Shape {
  int outputs, inputs;
};
constexpr Shape SHAPES[] = {{1, 256}, {31, 512}, {70, 768}};
constexpr int MOST_COUNT = 17;  // rows

// Marsaglia's xorshift.
struct Random {
  uint64_t state;
  uint64_t next() {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state;
  }
  // From -1 to 1, in steps that are exact.
  float value() { return (float)((int64_t)(next() >> 40) - (1 << 23)) / (1 << 23); }
};

// The place of the first float16 in blocks.
int first_half(int kind) {
  switch (kind) {
    case Q6_K:
      return 208;
    case Q2_K:
      return 80;
    case Q3_K:
      return 108;
    case TQ1_0:
      return 52;
    case TQ2_0:
      return 64;
    case IQ1_M:
      return 54;  // its upper 4 bits
    default:
      return 0;
  }
}

// Random blocks of a kind of files. Exponents of float16 lie in the middle of their range.
std::vector<uint8_t> random_blocks(int kind, size_t count, Random& random) {
  const Format& format = format_of(kind);
  std::vector<uint8_t> blocks(count * format.stored);
  for (size_t i = 0; i < blocks.size(); i++) blocks[i] = (uint8_t)random.next();
  for (size_t i = 0; i < count; i++) {
    uint8_t* block = blocks.data() + i * format.stored;
    if (kind == MXFP4) {  // whose scales are powers of two
      block[0] = (uint8_t)(118 + block[0] % 6);
      continue;
    }
    if (kind == NVFP4) {  // whose scales are float8_e4m3, without a sign
      for (int place = 0; place < 4; place++) block[place] &= 0x3f;
      continue;
    }
    const int first = first_half(kind), last = first + (format.minimums == ALIKE ? 2 : 0);
    for (int place = first; place <= last; place += 2) block[place + 1] = (block[place + 1] & 0x87) | 0x20;
  }
  return blocks;
}

uint64_t digest(uint64_t found, const float* values, size_t count) {
  for (size_t i = 0; i < count; i++) {
    uint32_t bits;
    std::memcpy(&bits, values + i, 4);
    found = (found ^ bits) * 0x100000001b3;  // FNV-1a, of words
  }
  return found;
}

uint64_t digest_of(int kind, Shape shape, Random& random) {
  std::vector<float> scales(shape.outputs);
  for (float& scale : scales) scale = random.value();
  Matrix matrix{kind, shape.outputs, shape.inputs, nullptr, kind % 2 ? scales.data() : nullptr};
  matrix.data = std::aligned_alloc(64, (matrix.bytes() + 63) / 64 * 64);
  std::memset(matrix.data, 0, matrix.bytes());
  std::vector<float> weights(shape.inputs);
  std::vector<uint8_t> grid(2048 * 8);
  for (uint8_t& value : grid) value = (uint8_t)(random.next() % 3);
  for (int output = 0; output < shape.outputs; output++) {
    if (kind > INT4) {
      const auto blocks = random_blocks(kind, shape.inputs / format_of(kind).stored_inputs(), random);
      put_stored(matrix, output, 1, {blocks.data(), blocks.size(), grid.data()});
      continue;
    }
    for (float& weight : weights) weight = random.value();
    put_floats(matrix, output, weights.data());
  }
  const size_t size = (size_t)MOST_COUNT * shape.inputs;
  std::vector<float> floats(size);
  std::vector<RowBlock> blocks(size / BLOCK);
  for (float& value : floats) value = random.value();
  uint64_t found = 0xcbf29ce484222325;
  for (int output = 0; output < shape.outputs; output++) {
    take(matrix, output, weights.data());
    found = digest(found, weights.data(), weights.size());
  }
  std::vector<float> out((size_t)MOST_COUNT * shape.outputs);
  for (int count = 1; count <= MOST_COUNT; count++) {
    const Rows rows{shape.inputs, count, floats.data(), blocks.data()};
    for (int row = 0; row < count && matrix.quantized(); row++) quantize(rows, row);
    for (int panel = 0; panel < matrix.panels(); panel++)
      multiply_panel(matrix, panel, rows, [&](int row, const float* products) {
        const int first = panel * PANEL;
        std::copy(products, products + std::min(PANEL, shape.outputs - first), out.begin() + (size_t)row * shape.outputs + first);
      });
    found = digest(found, out.data(), (size_t)count * shape.outputs);
  }
  std::free(matrix.data);
  return found;
}

struct Attention {
  int groups, width, window;
  float cap, sink;  // 0 = none
  int latent = 0;   // the first values of a key that are its value; 0 = values are apart
};
constexpr Attention ATTENTION[] = {{1, 64, 0, 0, 0}, {3, 32, 0, 2, 0}, {4, 80, 50, 0, 0.5f}, {5, 336, 0, 0, 0, 320}};
constexpr int CONTIGUOUS = 150, OWN = 20;  // positions

// Attention of a tree of nodes after a text, in companies of up to MOST_COUNT rows. A row's text ends with itself and every third
// node before it.
uint64_t digest_of_attention(int stored, Attention known, Random& random) {
  const int groups = known.groups, width = known.width, value_width = known.latent ? known.latent : width;
  const int64_t stride = stored == STORED_FLOAT32 ? 4 * width : stored == STORED_INT8 || stored == STORED_FLOAT8 ? width + 4 : 2 * width;
  std::vector<char> data[2];
  std::vector<float> values(width);
  for (auto& part : data) {
    part.resize(stride * (CONTIGUOUS + OWN));
    for (int slot = 0; slot < CONTIGUOUS + OWN; slot++) {
      for (float& value : values) value = random.value();
      write_position({part.data(), stride, stored, width}, slot, values.data());
    }
  }
  const Plane keys{data[0].data(), stride, stored, width};
  const Plane apart{data[1].data(), stride, stored, width};
  static AttentionSpace space;
  space.fit(width);
  std::vector<std::vector<int32_t>> slots(MOST_COUNT);
  std::vector<Text> texts;
  for (int row = 0; row < MOST_COUNT; row++) {
    for (int node = row % 3; node <= row; node += 3) slots[row].push_back(CONTIGUOUS + node);
    texts.push_back({CONTIGUOUS, CONTIGUOUS + (int)slots[row].size(), slots[row].data()});
  }
  std::vector<float> queries((size_t)MOST_COUNT * groups * width), out((size_t)MOST_COUNT * groups * value_width);
  for (float& value : queries) value = 4 * random.value();
  const std::vector<float> sinks(groups, known.sink);
  const Scoring scoring = {0.25f, known.cap, known.window, known.sink ? sinks.data() : nullptr};
  uint64_t found = 0xcbf29ce484222325;
  for (int count : {1, 2, 5, MOST_COUNT / groups}) {
    attend(space, keys, known.latent ? keys : apart, texts.data(), count, groups, {queries.data(), groups * width, width, width},
           {out.data(), groups * value_width, value_width, value_width}, scoring);
    found = digest(found, out.data(), (size_t)count * groups * value_width);
  }
  return found;
}

}  // namespace

int main(int count, char** arguments) {
#ifdef __AMX_TILE__
  if (syscall(SYS_arch_prctl, 0x1023, 18)) return 1;  // as in variants.py: the system must permit tile registers
#endif
  for (int i = 1; i < count; i++) {
    const uint64_t seed = 0x9e3779b97f4a7c15 * (std::strtoull(arguments[i], nullptr, 10) + 1);
    for (const Shape shape : SHAPES)
      for (int kind = FLOAT32; kind < INT8 + (int)std::size(FORMATS); kind++) {
        Random random{seed};
        std::printf("%s %d %d %d %016llx\n", arguments[i], kind, shape.outputs, shape.inputs,
                    (unsigned long long)digest_of(kind, shape, random));
      }
    for (const Attention known : ATTENTION)
      for (int stored = STORED_FLOAT32; stored <= STORED_FLOAT8; stored++) {
        Random random{seed};
        std::printf("%s attention %d %d %d %016llx\n", arguments[i], stored, known.groups, known.width,
                    (unsigned long long)digest_of_attention(stored, known, random));
      }
  }
}
