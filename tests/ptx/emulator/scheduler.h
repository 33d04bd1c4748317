// Runs a translated kernel, KERNEL(): programs in random order, up to `window` of them and all their warps in turns.
static const size_t STACK = 1 << 18;
static const u64 PATIENCE = 200000;  // turns without a write

static void begin() {
  KERNEL();
  for (;;) give_turn(DONE);
}

static Program* start(u32 number, u32 bytes) {
  Program* program = new Program();
  program->x = number % GRID_X, program->y = number / GRID_X % GRID_Y, program->z = number / GRID_X / GRID_Y;
  program->bytes = bytes, program->number = number;
  program->shared = (u8*)aligned_alloc(1024, (bytes + 1023) / 1024 * 1024 + 1024);
  memset(program->shared, 0xff, bytes);
  for (u32 number = 0; number < THREADS / 32; number++) {
    Warp* warp = new Warp();
    warp->number = number, warp->program = program, warp->state = READY, warp->stack = (char*)malloc(STACK);
    warp->id = program->number * (THREADS / 32) + number;
#ifdef RACE
    warp->clock.resize(GRID_X * GRID_Y * GRID_Z * (THREADS / 32));
    warp->clock[warp->id] = 1;
#endif
    getcontext(&warp->context);
    warp->context.uc_stack.ss_sp = warp->stack, warp->context.uc_stack.ss_size = STACK, warp->context.uc_link = 0;
    makecontext(&warp->context, begin, 0);
    program->warps.push_back(warp);
  }
  return program;
}

static void end(Program* program) {
#ifdef RACE
  forget_shared(program->shared, program->bytes);
#endif
  for (Warp* warp : program->warps) free(warp->stack), delete warp;
  free(program->shared);
  delete program;
}

// One that is ready, at random; null where all are at a barrier or done.
static Warp* choose(Program* program) {
  u32 count = program->warps.size(), first = random32() % count;
  for (u32 i = 0; i < count; i++)
    if (program->warps[(first + i) % count]->state == READY) return program->warps[(first + i) % count];
  return nullptr;
}

// The warps of a program that meet at a barrier know what all of them have done.
static void meet(Program* program) {
#ifdef RACE
  std::vector<u32> all;
  for (Warp* warp : program->warps) join(all, warp->clock);
  for (Warp* warp : program->warps) warp->clock = all, warp->clock[warp->id]++;
#endif
}

// starved: one program in `window` hardly ever has its turn.
extern "C" const char* run(
    u32 x, u32 y, u32 z, u32 threads, u32 bytes, void** parameters, u32 window, u64 seed, u32 starved) {
  GRID_X = x, GRID_Y = y, GRID_Z = z, THREADS = threads, PARAMETERS = parameters, FAILURE[0] = 0;
  RANDOM = seed * 2654435761u + 88172645463325252ull;
  std::vector<u32> order(x * y * z);
  for (u32 i = 0; i < order.size(); i++) order[i] = i;
  for (u32 i = order.size(); i > 1; i--) std::swap(order[i - 1], order[random32() % i]);
  struct sigaction handler = {}, before;
  handler.sa_handler = outside;
  sigaction(SIGSEGV, &handler, &before);
  std::vector<Program*> live;
  size_t next = 0;
  u64 writes = WRITES, turns = 0;
#ifdef RACE
  SHADOW.clear(), RELEASED.clear(), AGAIN.clear();
#endif
  while (!FAILURE[0] && (next < order.size() || !live.empty())) {
    while (live.size() < window && next < order.size()) live.push_back(start(order[next++], bytes));
    if (WRITES != writes || live.empty()) writes = WRITES, turns = 0;
    if (++turns > PATIENCE) fail_launch("no progress: programs wait for what nobody writes");
    u32 turn = random32() % live.size();
    if (starved && turn == 0 && live.size() > 1 && random32() % 1000) turn = 1 + random32() % (live.size() - 1);
    Program* program = live[turn];
    if (Warp* warp = choose(program)) {
      CURRENT = warp;
      swapcontext(&SCHEDULER, &warp->context);
      continue;
    }
    bool waiting = false;
    for (Warp* warp : program->warps)
      if (warp->state == AT_BARRIER) waiting = true, warp->state = READY;
    if (waiting) {  // those that have ended count as arrived
      meet(program), WRITES++;
      continue;
    }
    WRITES++;
    end(program);
    live.erase(live.begin() + turn);
  }
  for (Program* program : live) end(program);
  sigaction(SIGSEGV, &before, nullptr);
  return FAILURE;
}
