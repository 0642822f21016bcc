// A process of another processor's, emulated, that runs the passes of a Python process beside it: it reads what a pass
// points to from that process's memory, runs it, and writes back what the pass has written.
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include "../core/runners/native.cpp"

static int memory;
static void* copies[4096];
static int held;

static void stop(const char* why) {
  fprintf(stderr, "emulated: %s\n", why);
  exit(1);
}

// Memory until the pass is done.
template <class T>
static T* room(int64_t count) {
  void* here = aligned_alloc(64, (count * sizeof(T) + 63) / 64 * 64);
  if (!here || held == sizeof copies / sizeof *copies) stop("there is no room");
  return (T*)(copies[held++] = here);
}

// A copy of what lies over there.
template <class T>
static T* fetched(const T* there, int64_t count) {
  if (!there || count <= 0) return 0;
  T* here = room<T>(count);
  if (pread(memory, here, count * sizeof(T), (off_t)there) != (ssize_t)(count * sizeof(T))) stop("memory cannot be read");
  return here;
}

template <class T>
static void put_back(const T* here, const T* there, int64_t count) {
  if (!there || count <= 0) return;
  if (pwrite(memory, here, count * sizeof(T), (off_t)there) != (ssize_t)(count * sizeof(T))) stop("memory cannot be written");
}

static int64_t size_of(const Weight& w) {
  const int64_t bytes = w.kind == FLOAT32 ? w.ins * 64 : w.kind == BFLOAT16 ? w.ins * 32 : w.ins / GROUP * TILE_BYTES(w.kind);
  return bytes * w.tiles;
}

static int64_t filled(int64_t width) { return (width + GROUP - 1) / GROUP * GROUP; }

static int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }

static void emulate(const Program* program_there, const Pass* pass_there) {
  Program p = *fetched(program_there, 1);
  Pass pass = *fetched(pass_there, 1);
  p.widths = fetched(p.widths, p.buffers);
  Step* steps = fetched(p.step, p.steps);
  p.step = steps;
  pass.ids = fetched(pass.ids, pass.n);
  int64_t layers = 0, kinds = 0, slots = 0, positions = 0, own = 0, widest = GROUP, most_id = 0, logits = 0;
  for (int i = pass.first; i < pass.last; i++) {
    Step& s = steps[i];
    const bool attends = s.op == HEADS || s.op == TURN || s.op == ATTEND;
    if (attends) layers = larger_of(layers, s.layer + 1), kinds = larger_of(kinds, s.kind + 1);
    const bool wide = s.flags & WIDE;
    s.norm = fetched(s.norm, attends ? (int64_t)p.size * (wide ? p.heads : 1) : filled(s.width));
    s.other_norm = fetched(s.other_norm, (int64_t)p.size * (wide ? p.key_heads : 1));
    if (s.op == EMBED) {
      for (int row = 0; row < pass.n; row++) most_id = larger_of(most_id, pass.ids[row]);
      s.table = fetched((const uint8_t*)s.table, (most_id + 1) * s.width * (wide ? 4 : 2));
    }
    widest = larger_of(widest, filled(s.at + s.width));
    if (!s.weight) continue;
    Weight* w = fetched(s.weight, 1);
    s.weight = w;
    w->data = fetched(w->data, size_of(*w));
    w->bias = fetched(w->bias, 16 * w->tiles);
    widest = larger_of(widest, w->ins);
    if (s.op == LOGITS) logits = 16 * w->tiles;
  }
  if (layers) {
    pass.rows = fetched(pass.rows, pass.n);
    for (int i = 0; i < pass.n; i++) {
      const Row& row = pass.rows[i];
      slots = larger_of(slots, row.slot + 1);
      positions = larger_of(positions, row.position + 1);
      own = larger_of(own, row.own + row.own_count);
    }
    pass.cells = fetched(pass.cells, own);
    pass.capacities = fetched(pass.capacities, slots);
    Turning* turnings = fetched(pass.turnings, kinds);
    pass.turnings = turnings;
    for (int i = 0; i < kinds; i++) {
      turnings[i].cosines = fetched(turnings[i].cosines, positions * (p.size / 2));
      turnings[i].sines = fetched(turnings[i].sines, positions * (p.size / 2));
    }
  }
  void* const* caches_there = fetched(pass.caches, slots);
  void** caches = room<void*>(slots + 1);
  const auto cache_bytes = [&](int64_t slot) {
    return layers * 2 * p.key_heads * pass.capacities[slot] * p.padded * (p.wide_cache ? 4 : 2);
  };
  for (int64_t i = 0; i < slots; i++) caches[i] = fetched((uint8_t*)caches_there[i], cache_bytes(i));
  pass.caches = caches;
  float* const* buffers_there = fetched(pass.buffers, p.buffers);
  float** buffers = room<float*>(p.buffers);
  for (int i = 0; i < p.buffers; i++) buffers[i] = fetched(buffers_there[i], (int64_t)pass.n * p.widths[i]);
  pass.buffers = buffers;
  uint8_t** work = room<uint8_t*>(2 + 2 * MOST_THREADS);
  for (int i = 0; i < 2 + 2 * MOST_THREADS; i++) {
    const int64_t rows = i < 2 ? pass.n : ALONE;
    work[i] = room<uint8_t>(rows * (4 * widest + 64));
  }
  pass.activations = work;
  float *output_there = pass.output, *logits_there = pass.logits, *told_there = pass.told;
  int64_t* likeliest_there = pass.likeliest;
  pass.output = fetched(output_there, (int64_t)pass.n * pass.stride);
  pass.logits = fetched(logits_there, pass.wanted * logits);
  if (pass.likeliest) {
    pass.likeliest = fetched(likeliest_there, pass.wanted);
    pass.told = fetched(told_there, 2 * (int64_t)pass.wanted);
  }
  native_pass(&p, &pass);
  for (int64_t i = 0; i < slots; i++) put_back((uint8_t*)caches[i], (uint8_t*)caches_there[i], cache_bytes(i));
  for (int i = 0; i < p.buffers; i++) put_back(buffers[i], buffers_there[i], (int64_t)pass.n * p.widths[i]);
  put_back(pass.output, output_there, (int64_t)pass.n * pass.stride);
  put_back(pass.logits, logits_there, pass.wanted * logits);
  if (!pass.likeliest) return;
  put_back(pass.likeliest, likeliest_there, pass.wanted);
  put_back(pass.told, told_there, 2 * (int64_t)pass.wanted);
}

// The first argument is the other process's number. Asked by three numbers: what to do, and two addresses there.
int main(int, char** given) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%s/mem", given[1]);
  memory = open(path, O_RDWR);
  if (memory < 0) stop("the memory of the process that asks cannot be opened");
  int64_t asked[3], answer;
  while (fread(asked, sizeof asked, 1, stdin) == 1) {
    answer = native_layout();
    if (asked[0] == 1) native_levels(fetched((const float*)asked[1], 16));
    if (asked[0] == 2) emulate((const Program*)asked[1], (const Pass*)asked[2]);
    while (held) free(copies[--held]);
    fwrite(&answer, sizeof answer, 1, stdout);
    fflush(stdout);
  }
}
