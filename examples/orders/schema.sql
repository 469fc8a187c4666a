-- The tables of the shop. Those of kconsume are made by kconsume.
create table orders (
    number int primary key,
    sku text not null,
    quantity int not null,
    cancelled boolean not null default false,
    state text not null default 'placed',
    told int not null default 0 -- how often the inventory's answer was noted
);
create table stock (sku text primary key, reserved int not null default 0);
create table ledger (number int not null, sku text not null, quantity int not null, attempt int not null);
create index on ledger (number);
-- The letter office's own book.
create table letters (key text primary key, number int not null, text text not null, asked int not null default 1);
